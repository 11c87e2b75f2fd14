"""/metrics: every metric of the table, in a form that Prometheus reads, with figures that are those of the answers."""

from __future__ import annotations

import re

import pytest

from core.metrics import METRICS, Phase
from tests.api.conftest import Start
from tests.app.served import eventually

SAMPLE = re.compile(r'^(moestro_[a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)$')


def read(text: str) -> tuple[dict[str, str], dict[str, float]]:
    """Kind of each family, and value of each sample by its name and labels."""
    kinds: dict[str, str] = {}
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds, "a family comes twice"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found, line
            assert found[1] in kinds, "a sample without its family"
            samples[f"{found[1]}{{{found[2] or ''}}}"] = float(found[3])
    assert text.endswith("\n")
    return kinds, samples


def test_what_passes_came_to_is_counted_by_phase(start: Start) -> None:
    client, host, _ = start("one two three")
    assert "moestro_tokens_total" not in client.get("/metrics").text
    for _ in range(2):
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds, samples = read(reply.text)
    assert host.models.load_id is not None
    records = list(host.store.steps.records(load=host.models.load_id))
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase in phases:
        steps = [one for one in records if one.phase == phase]
        assert samples[f'moestro_passes_total{{phase="{phase}"}}'] == len(steps) > 0
        assert samples[f'moestro_requests_total{{phase="{phase}"}}'] == sum(one.requests for one in steps)
        assert samples[f'moestro_hits_total{{phase="{phase}"}}'] == sum(one.hits for one in steps)
        assert samples[f'moestro_demand_bytes_total{{phase="{phase}"}}'] == sum(one.demand_bytes for one in steps)
        assert samples[f'moestro_total_seconds_total{{phase="{phase}"}}'] == pytest.approx(0.02 * len(steps))
    assert samples["moestro_slots{}"] == records[-1].slots
    eventually(lambda: 'moestro_answers_total{reason="stop"} 2.0' in client.get("/metrics").text)
    assert kinds["moestro_model_info"] == "gauge"


def test_every_metric_of_the_table_is_there(start: Start) -> None:
    client, _, _ = start()
    client.post("/v1/completions", json={"prompt": "x"})
    kinds, _ = read(client.get("/metrics").text)
    names = {re.sub("_(ms|s)$", "_seconds", one.name) for one in METRICS if not isinstance(one.reduce, tuple)}
    missing = {
        name for name in names if not any(f"moestro_{name}{end}" in kinds for end in ("", "_total", "_passes_total"))
    }
    assert not missing
    assert kinds["moestro_slots"] == kinds["moestro_net_seconds"] == "gauge"
    assert kinds["moestro_exact_passes_total"] == kinds["moestro_hits_total"] == "counter"


def test_labels_hold_any_text(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client, host, _ = start()
    monkeypatch.setattr(type(host.models), "model", property(lambda self: 'C:\\a "b"\nc'))
    assert 'model="a \\"b\\"\\nc@' in client.get("/metrics").text
