"""One text under two settings: the same tokens by turns, from the same cache, and nothing is left changed."""

import json
import threading
from dataclasses import replace

import pytest

from core.engine import Engine
from core.engine.passages import STRETCH
from core.errors import SettingError
from core.measure.evaluate import beside as module
from core.measure.evaluate.beside import beside
from core.measure.evaluate.sides import FEWEST, Side, Sides
from core.memory.store import Cancelled
from core.settings.config import Settings
from core.settings.sampling import Sampling

ASKED = "Hi"


def sides(engine: Engine, **b: object) -> tuple[Settings, Settings]:
    return engine.settings, engine.settings.with_(b)


def test_two_budgets_give_the_same_bits_and_other_hit_rates(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    before, turns = engine.settings, list[str]()
    a, b = before.with_({"budget": "75%"}), before
    real = module.start_mode

    def start(engine: Engine, settings: Settings) -> None:
        turns.append("A" if settings == a else "B")
        real(engine, settings)

    monkeypatch.setattr(module, "start_mode", start)
    found = beside(engine, ASKED, a, b, names=("more", "less"), tokens=FEWEST, rounds=2)
    assert turns == ["A", "A", "B", "B", "A"], "A answers, then both by turns"
    assert engine.settings == before
    assert (found.tokens, found.equal, found.agreed, found.kl) == (FEWEST, FEWEST, FEWEST, 0)
    assert found.differing == {"budget": ("75%", "50%")} and found.names == ("more", "less")
    assert found.a.hit_rate is not None and found.b.hit_rate is not None and found.a.hit_rate > found.b.hit_rate
    assert found.b.misses > found.a.misses > 0 and found.b.link_bytes > found.a.link_bytes > 0
    assert found.a.changed == found.b.changed == 0 and min(*found.a.token_ms, found.b.first_ms) > 0
    assert Sides.read(json.loads(json.dumps(found.dump()))) == found


def test_the_text_is_what_a_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.prompt, "ends", set())
    pieces = engine.generate([{"role": "user", "content": ASKED}], Sampling(max_new_tokens=FEWEST + 1))
    answer = [piece.token for piece in pieces if piece.kind == "token"]
    a, _ = sides(engine)
    found = beside(engine, ASKED, a, a, tokens=FEWEST, rounds=1)
    assert found.text == engine.prompt.tokenizer.decode(answer)
    assert found.differing == {} and found.a.hit_rate == found.b.hit_rate and found.equal == FEWEST


def test_a_lossy_side_is_told_by_its_logits(engine: Engine) -> None:
    a, b = sides(engine, miss="drop")
    found = beside(engine, ASKED, a, b, tokens=FEWEST, rounds=1)
    assert found.equal < FEWEST and found.kl > 0
    assert found.a.changed == 0 and found.b.changed is not None and found.b.changed > 0


def test_guessed_tokens_have_no_part_in_it(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts, real = set[object](), module.start_mode

    def start(engine: Engine, settings: Settings) -> None:
        drafts.add(settings["drafts"])
        real(engine, settings)

    monkeypatch.setattr(module, "start_mode", start)
    a, b = sides(engine, drafts="lookup")
    assert beside(engine, ASKED, a, b, tokens=FEWEST, rounds=1).differing == {} and drafts == {"off"}


def test_the_live_figures_leave_it_out(engine: Engine) -> None:
    def live() -> tuple[list[int], object, object, float, bool]:
        frame = engine.frame()
        passes = frame.columns["step"].tolist()
        return passes, frame.marks, frame.coactivation.tolist(), frame.hit, frame.exact

    list(engine.generate(ASKED, Sampling(max_new_tokens=3)))
    before, (a, b) = live(), sides(engine, miss="drop", budget="75%")
    beside(engine, ASKED, a, b, tokens=FEWEST, rounds=1)
    assert live() == before
    list(engine.generate(ASKED, Sampling(max_new_tokens=3)))
    assert len(live()[0]) > len(before[0]), "they go on with the next answer"


def test_what_is_wrong_is_said_and_a_cancel_leaves_nothing_changed(engine: Engine) -> None:
    before = engine.settings
    a, b = sides(engine, budget="75%")
    for asked, tokens, rounds, why in (
        (" ", FEWEST, 1, "Type a question"),
        (ASKED, FEWEST - 1, 1, "32 to 512 tokens"),
        (ASKED, FEWEST, 0, "1 to 20 rounds"),
        ("Once more. " * 4, FEWEST, 1, "shorter question"),
    ):
        with pytest.raises(SettingError, match=why):
            beside(engine, asked, a, b, tokens=tokens, rounds=rounds)
    cancel = threading.Event()

    def progress(text: str, share: float) -> None:
        if text.endswith("B"):
            cancel.set()

    with pytest.raises(Cancelled):
        beside(engine, ASKED, a, b, tokens=FEWEST, progress=progress, cancel=cancel)
    assert engine.settings == before


SIDE = Side(5.0, (2.0,) * 96, 0.5, 1.5, 0.3, 1e5, 0.0, True)
FOUND = Sides("demo", ("A", "B"), "Hi", "Hello", 4, 3, {"budget": ("50%", "25%")}, SIDE, SIDE, 96, 96, 0.0)


def test_faster_is_what_exceeds_the_noise() -> None:
    noisy = tuple(2.0 * (1.5 if at // STRETCH % 2 else 0.7) for at in range(96))
    for times, verdict in (((3.0,) * 96, "a"), ((1.0,) * 96, "b"), (noisy, ""), ((2.0,) * 96, "")):
        found = replace(FOUND, b=replace(SIDE, token_ms=times))
        assert found.verdict == verdict
        assert found.ratio is not None and found.ratio[1] <= found.ratio[0] <= found.ratio[2]
    twice = replace(FOUND, b=replace(SIDE, token_ms=(4.0,) * 96))
    assert twice.ratio == pytest.approx((2, 2, 2)) and twice.b.tok_s == 250


def test_the_table_has_a_line_for_each_token() -> None:
    lines = FOUND.csv().splitlines()
    assert lines[:3] == ["# A: A, B: B", "# link: emulated", "# budget: A 50%, B 25%"]
    assert lines[3:5] == ["token,a_ms,b_ms", "1,2.0,2.0"] and len(lines) == 100
    own = replace(SIDE, emulated=False)
    assert "emulated" not in replace(FOUND, a=own, b=own).csv()
