"""The speed said before a load against that of the answers that follow: six configurations of the demo and of an int4
pack of it, never used before, and again after a restart, when each has been. Prints the table. What other programs do
meanwhile changes what follows, so the median is held to the bound, not each line."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest

from app.services.host import Host
from app.store import Store
from core.capacity import forecast
from core.importing import import_model
from core.memory.link import measure_gbps
from core.types import Fit
from tests.app.conftest import WAIT_S, ended

DEMO = Path(__file__).parents[2] / "assets" / "demo"
QUESTIONS = [json.loads(line)["question"] for line in (DEMO / "questions.jsonl").read_text("utf-8").splitlines()]
ASKED = QUESTIONS[:: len(QUESTIONS) // 12][:12]
WITHIN = 0.25


class Case(NamedTuple):
    """A configuration: the pack or the demo itself, and its settings."""

    pack: bool
    settings: dict[str, object]


CASES = (
    Case(False, {"budget": "25%"}),
    Case(False, {"budget": "50%", "eviction": "lfu"}),
    Case(False, {"budget": "75%", "scope": "global"}),
    Case(False, {"budget": "50%", "predictor": "previous_token"}),
    Case(True, {"budget": "25%"}),
    Case(True, {"budget": "75%", "eviction": "lfu"}),
)
PLAIN = {"budget": "50%", "eviction": "lru", "scope": "layer", "predictor": "none"}


@contextmanager
def started(folder: Path) -> Iterator[Host]:
    """A host with the real engine, in a process that has measured nothing yet."""
    forecast._measured.clear()
    measure_gbps.cache_clear()
    host = Host(Store(folder))
    assert host.chats.set_sampling(max_new_tokens=64, temperature=0.0) == ""
    try:
        yield host
    finally:
        host.close()


def used(host: Host, model: str, settings: dict[str, object]) -> tuple[Fit, float]:
    """What is said of a configuration, and tokens a second of the answers that follow."""
    assert host.models.change_many({**PLAIN, **settings}) == ""
    spec = host.loader.plan(model, context=1024)
    fit = host.loader.estimate(spec)
    loading = host.loader.load(spec)
    assert loading.join(WAIT_S) and not loading.error, loading.error
    for question in ASKED:
        assert ended(host.chats.ask(None, question)).error == ""
    steps = [s for s in host.store.steps.records(load=host.models.load_id) if s.phase == "decode"]
    return fit, 1e3 * len(steps) / sum(s.total_ms for s in steps)


def off(fit: Fit, tok_s: float) -> float:
    """How far the middle of the range is from what followed."""
    return (fit.tok_s_low * fit.tok_s_high) ** 0.5 / tok_s - 1


@pytest.mark.long(2)
def test_what_is_said_before_a_load_follows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = {False: "demo", True: str(import_model(str(DEMO), tmp_path / "pack", format="int4-g32"))}
    lines, errors = list[str](), list[float]()
    for phase in ("before", "after"):
        with started(tmp_path / "home") as host:
            if phase == "before":
                for model in models.values():
                    used(host, model, {})  # at 50 %, so that there are answers to go by
            for case in CASES:
                fit, tok_s = used(host, models[case.pack], case.settings)
                what = ", ".join(str(value) for value in case.settings.values())
                lines.append(
                    f"{phase:6} {'int4 pack' if case.pack else 'demo':9} {what:20} "
                    f"{fit.tok_s_low:6.1f} to {fit.tok_s_high:6.1f} tok/s, then {tok_s:6.1f} ({off(fit, tok_s):+.0%}): "
                    f"{fit.basis}"
                )
                errors.append(abs(off(fit, tok_s)))
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert median(errors) <= WITHIN, "\n".join(lines)
