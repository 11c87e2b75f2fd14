"""The page of GGUF architectures is current, and what it calls exact is tried."""

from __future__ import annotations

from pathlib import Path

from core.importing.sources.gguf.architectures import ARCHITECTURES
from core.importing.sources.gguf.refused import REFUSED
from tests import gguf_files
from tests.gguf_page import LISTED, page

PAGE = Path(__file__).parents[2] / "docs" / "gguf.md"
TRIED = {made["ggml"] for made in (gguf_files.ARCHITECTURES | gguf_files.OTHERS).values()} | {"qwen3vlmoe"}


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m tests.gguf_page > docs/gguf.md"


def test_an_architecture_is_read_or_refused_and_each_that_is_read_is_tried() -> None:
    assert not ARCHITECTURES.keys() & REFUSED.keys() and REFUSED.keys() <= set(LISTED)
    assert ARCHITECTURES.keys() == TRIED
    assert len(LISTED) == 45
