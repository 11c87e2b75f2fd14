"""The bundled model through the engine: right answers within half the memory, over a link that says it is emulated."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from core.engine import Engine
from core.hf.files import DEMO
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import AnswerStats


@pytest.fixture(scope="module")
def demo() -> Iterator[Engine]:
    engine = Engine.load(LoadSpec.checked("demo", Settings({"budget": "50%"}), device="cpu"))
    yield engine
    engine.unload()


def ask(engine: Engine, question: str) -> tuple[str, AnswerStats]:
    pieces = list(engine.generate([{"role": "user", "content": question}], Sampling(max_new_tokens=64)))
    stats = pieces[-1].stats
    assert stats is not None
    return "".join(p.text for p in pieces), stats


@pytest.mark.long(0.3)  # tests/evaluate/test_demo.py asks the demo model, too
@pytest.mark.parametrize(
    "settings", [{"predictor": "gate"}, {}, {"eviction": "none"}, {"eviction": "lfu", "scope": "global"}]
)
def test_suggested_questions_are_answered_right_under_any_policy(demo: Engine, settings: dict[str, object]) -> None:
    rows = [json.loads(line) for line in (DEMO / "questions.jsonl").read_text(encoding="utf-8").splitlines()]
    suggested = [row for row in rows if row["suggest"]]
    assert len(suggested) >= 20
    demo.change({**Settings({"budget": "50%"}), **settings})
    for row in suggested[:6]:
        text, stats = ask(demo, row["question"])
        assert text.strip() == row["answer"].strip()
        assert stats.exact
        assert stats.reason == "stop"
        assert stats.device_bytes_peak <= max(
            stats.budget_bytes, demo.sizes.bytes(demo.sizes.slots(Settings().cache.budget))
        )
    demo.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_the_link_of_the_demo_is_emulated_and_says_so(demo: Engine) -> None:
    demo.change(dict(Settings({"budget": "50%"})))
    _, stats = ask(demo, "What does json.dumps do?")
    assert stats.emulated
    assert demo.frame().emulated
    assert demo.manifest()["link"] == "emulated"
    assert 0.01 < demo.frame().link_limit_gbps < 20
    demo.change({"link": "own"})
    _, stats = ask(demo, "What does json.dumps do?")
    assert not stats.emulated
    assert demo.manifest()["link"] == "measured"


def test_the_manifest_says_whether_the_settings_are_exact(demo: Engine) -> None:
    for changes, exact in (({}, True), ({"miss": "drop"}, False), ({"predictor": "gate", "execute": "always"}, False)):
        demo.change({**Settings({"budget": "50%"}), **changes})
        assert demo.manifest()["exact"] is exact
    demo.change(dict(Settings({"budget": "50%"})))
    assert demo.manifest()["exact"] is True and demo.manifest()["closeness"] == 0.0
