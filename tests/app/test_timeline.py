"""The timeline of an answer in Chrome's trace format, against the recorded passes."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from app.services.exports import timeline
from app.services.exports.archive import NothingThere
from app.services.host import Host
from core.types import Outcome
from tests.app.conftest import ended


def test_a_timeline_has_the_last_answers_passes_and_copies(host: Host, tmp_path: Path) -> None:
    chat = ended(host.chats.ask(None, "one two three")).chat_id
    assert chat is not None and host.models.change("budget", "31%") == ""
    answer = ended(host.chats.ask(chat, "four")).message_id
    found = json.loads(timeline.write(host.store, tmp_path / "out" / "it.json", chat).read_text("utf-8"))
    events, steps = found["traceEvents"], list(host.store.steps.records(answer=answer))
    of = {thread: [e for e in events if e["ph"] == "X" and e["tid"] == thread] for thread in range(80)}
    assert found["otherData"]["answer"] == answer and 2 < len(steps) == len(of[timeline.PASSES])
    for event, step in zip(of[timeline.PASSES], steps, strict=True):
        assert event["ts"] == pytest.approx(step.started_s * 1e6) and event["dur"] == pytest.approx(step.total_ms * 1e3)
        assert event["args"]["pass"] == step.index
        told = [v.split()[:3] for k, v in event["args"].items() if k.startswith("layer ")]
        hits = int((step.outcome <= Outcome.PREFETCH_HIT).sum())
        assert (sum(int(hit) for hit, _, _ in told), sum(int(n) for *_, n in told)) == (hits, len(step.outcome))
    parts = sum(e["dur"] for e in of[timeline.SHARES])
    assert parts == pytest.approx(1e3 * sum(s.compute_ms + s.stall_ms + s.idle_ms for s in steps))
    copies = [e for thread in range(10, 80) for e in of[thread]]
    moved = [t for step in steps for t in step.transfers]
    assert sum(e["args"]["bytes"] for e in copies) == sum(t.bytes for t in moved) > 0
    for thread in range(10, 80):  # none lies over another on its thread
        mine = of[thread]
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in pairwise(mine))
    assert [e["name"] for e in events if e["ph"] == "i"] == ["Memory budget: 62% → 31%"]


def test_a_chat_without_recorded_passes_has_no_timeline(host: Host, tmp_path: Path) -> None:
    with pytest.raises(NothingThere, match="Telemetry"):
        timeline.write(host.store, tmp_path / "it.json", 77)
    assert not (tmp_path / "it.json").exists()
