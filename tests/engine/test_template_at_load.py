"""A load tries the model's chat template, and keeps the process that renders it until the model is unloaded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from core.engine import Engine
from core.errors import ModelError
from core.settings.loading import LoadSpec
from core.system.template_worker import RENDERER


def test_a_template_that_fails_ends_the_load(model: Path, tmp_path: Path) -> None:
    broken, before = shutil.copytree(model, tmp_path / "broken"), len(RENDERER._owners)
    (broken / "chat_template.jinja").write_text("{% for m in messages %}")
    with pytest.raises(ModelError, match=r"chat template is damaged in line 1: .* Download"):
        Engine.load(LoadSpec.checked(str(broken), context=256))
    assert len(RENDERER._owners) == before


def test_the_process_is_kept_as_long_as_the_model(model: Path) -> None:
    before = len(RENDERER._owners)
    engine = Engine.load(LoadSpec.checked(str(model), context=256))
    worker = RENDERER.pid
    assert len(RENDERER._owners) == before + 1
    assert engine.count_tokens([{"role": "user", "content": "hi"}]) == len("u:hi\na:")
    assert worker is not None and RENDERER.pid == worker
    engine.unload()
    assert len(RENDERER._owners) == before
