"""Suites that run, far too small to mean anything, with drawn profiles in place of calibrations."""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from bench.suites import suite
from tests.engine.profiles import drawn_profile


def profile(engine: Any, *texts: Any, **more: Any) -> Any:
    return replace(drawn_profile(engine), times={"att": 0.5, "moe": 0.3, "head": 1.0, "load": 0.7})


def calibrated(engine: Any, modes: Any, limit: int) -> Any:
    engine.use_profile(drawn_profile(engine))
    return drawn_profile(engine)


@dataclass
class Tried:
    result: dict[str, Any]
    text: str
    said: list[str]


def tried(name: str, keep: Path | None = None, **options: Any) -> Tried:
    said: list[str] = []
    found = json.loads(json.dumps(suite(name).run(small=True, keep=keep, say=said.append, **options), allow_nan=False))
    return Tried(found, "\n".join(suite(name).table(found)), said)


def only(monkeypatch: pytest.MonkeyPatch, module: Any, wanted: Callable[[str], bool]) -> dict[str, Any]:
    found = {name: of for name, of in module.subjects().items() if wanted(name)}
    monkeypatch.setattr(module, "calibrate", profile)
    monkeypatch.setattr(module, "subjects", lambda: found)
    return found
