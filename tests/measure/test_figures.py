"""What an evaluation is made of, by hand and by brute force, and scores for lm-evaluation-harness."""

import json
import math
import sys
import threading
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.engine import Engine
from core.engine.passages import spread
from core.engine.texts import bundled
from core.errors import ContextError, SettingError
from core.measure.evaluate.harness import adapter, run_tasks
from core.measure.evaluate.modes import BASE, PREDICTORS, chosen, modes_of, needs, residencies
from core.measure.evaluate.others import Others
from core.measure.evaluate.passages import Heard, read
from core.measure.evaluate.questions import FactQuestion, demo_questions, from_file, sample
from core.measure.evaluate.rows import (
    FIGURES,
    EvaluationRow,
    front,
    pareto,
    perplexity_of,
    rate,
    to_csv,
    to_json,
    with_savings,
)
from core.measure.evaluate.scorer import Scorer
from core.memory.store import Cancelled
from core.settings.config import Settings
from core.settings.sampling import Sampling

NUMBERS = st.one_of(st.none(), st.integers(0, 4).map(float))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=12))
def test_the_front_is_what_nothing_beats(points: list[tuple[float | None, float | None]]) -> None:
    def beaten(x: float, y: float) -> bool:
        return any(a is not None and b is not None and a >= x and b >= y and (a, b) != (x, y) for a, b in points)

    assert front(points) == [
        at for at, (x, y) in enumerate(points) if x is not None and y is not None and not beaten(x, y)
    ]


def test_rates_and_perplexity_by_hand() -> None:
    assert rate([True, True, False, True]) == (0.75, math.sqrt(0.75 * 0.25 / 4)) and rate([]) == (None, None)
    heard = Heard()
    exact = torch.tensor([0.5, 0.25, 0.25, 0.0]).log()
    heard.add(0, exact, exact)  # log-probabilities are logits, too
    heard.add(2, torch.tensor([0.25, 0.5, 0.125, 0.125]).log() + 7.0, exact)
    assert (heard.tokens, heard.agreed) == (2, 1)
    assert heard.nll == pytest.approx(math.log(2) + math.log(8))
    kl = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5) + 0.25 * math.log(0.25 / 0.125)
    assert heard.kl == pytest.approx(kl)  # the first one's is 0
    perplexity, error = perplexity_of(heard)
    assert perplexity == pytest.approx(4.0)  # exp(mean of ln 2 and ln 8)
    assert error == pytest.approx(4.0 * math.log(2) / math.sqrt(2))  # half their distance, over the root of two
    assert perplexity_of(Heard()) == (None, None) and perplexity_of(Heard(1, 1e9, 1e18)) == (math.inf, math.inf)


def test_savings_are_against_exact_mode_at_the_same_residency() -> None:
    rows = [
        EvaluationRow("exact", "Exact", 0.5, link_bytes=200.0),
        EvaluationRow("drop", "Drop", 0.5, link_bytes=50.0),
        EvaluationRow("drop", "Drop", 0.25, link_bytes=50.0),
        EvaluationRow("random", "Random", 0.5, problem="No."),
    ]
    assert [one.saved for one in with_savings(rows)] == [0.0, 0.75, None, None]


def test_what_other_programs_take_is_what_this_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, own = [10.0], SimpleNamespace(user=3.0, system=1.0)
    system = SimpleNamespace(user=100.0, system=5.0, idle=900.0)
    process = SimpleNamespace(cpu_times=lambda: SimpleNamespace(**vars(own)))
    monkeypatch.setattr("core.measure.evaluate.others.time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(
        "core.measure.evaluate.others.psutil",
        SimpleNamespace(Process=lambda: process, cpu_times=lambda: SimpleNamespace(**vars(system))),
    )
    since = Others()
    assert since.cores() is None
    clock[0], system.user, system.system, own.user = 14.0, 104.0, 7.0, 5.0  # 4 s: 6 s of cores, 2 of them ours
    assert since.cores() == 1.0


def test_rows_as_data() -> None:
    rows = [
        EvaluationRow(
            "a", "A", 0.5, exact_match=0.5, tok_s=9.0, perplexity=math.inf, settings={"rho": 1, "miss": "drop"}
        ),
        EvaluationRow("b", "B", 0.5, exact_match=0.4, tok_s=8.0),
        EvaluationRow("c", "C", 0.5, problem="Has no profile."),
    ]
    assert pareto(rows) == rows[:1] and EvaluationRow.read(asdict(rows[0])) == rows[0]
    assert to_json(rows[0])["perplexity"] is None and to_json(rows[0])["tok_s"] == 9.0
    head, *lines = [line for line in to_csv(rows, {"model": "demo"}).splitlines() if not line.startswith("#")]
    assert set(FIGURES) <= set(head.split(",")) and lines[0].endswith("False,rho=1 miss=drop") and len(lines) == 3
    assert "# model: demo" in to_csv(rows, {"model": "demo"}) and "# saved [share]:" in to_csv(rows, {})


def test_modes_are_settings() -> None:
    names = [mode.name for mode in modes_of()]
    expected = (
        "exact random drop drop_renormalised router_ranked similar cache_prior buddy_unlimited buddy_rho1_tae "
        "drop_rho1 execute_gate execute_hybrid_true verify"
    )
    assert len(names) == len(set(names)) and set(expected.split()) <= set(names)
    base = Settings({"miss": "drop", "rho": 2, "budget": "25%"})
    for mode in modes_of():
        settings = mode.over(base)
        assert settings.lossy.active == (mode.name not in ("exact", "paper_exact")) and settings["budget"] == "25%"
        assert {name: settings[name] for name in mode.settings} == dict(mode.settings)
        assert settings["quality_rate"] == 0 and all(
            settings[name] == value for name, value in BASE.items() if name not in mode.settings
        )
    fitted = {mode.name: mode.fitted(4).over(base)["rho"] for mode in modes_of()}
    assert (fitted["paper_95_16_rho3"], fitted["paper_95_16_rho4"], fitted["paper_95_16"]) == (2, 3, 64)
    assert fitted["buddy_rho3"] == 3
    parts = {mode.name: needs(mode.over(base)) for mode in modes_of()}
    assert parts["exact"] == parts["drop"] == () and parts["buddy_rho1"] == ("pairs",)
    assert parts["buddy_rho1_tae"] == ("pairs", "tae") and parts["drop_rho1_tae"] == ("tae",)
    assert "defaults" in parts["execute_default_vectors"]


def test_lists_of_modes_and_residencies() -> None:
    assert [mode.name for mode in chosen("drop, exact")] == ["exact", "drop"] and chosen("all") == list(modes_of())
    assert [mode.name for mode in chosen("all", modes_of(["gate"]))][-2:] == ["execute_gate", "execute_gate_true"]
    assert residencies("50%,.75, 1,0.5") == [1.0, 0.75, 0.5]
    for words, why in (("magic,drop", "no mode 'magic'. Choose all, or some of: exact"), ("", "at least one mode")):
        with pytest.raises(SettingError, match=why):
            chosen(words)
    for words in ("0", "1.5", "-.5", "half", "", "120%", "nan"):
        with pytest.raises(SettingError, match="not a share of the experts"):
            residencies(words)
    with pytest.raises(SettingError, match="no predictor called 'luck'"):
        modes_of([*PREDICTORS, "luck"])


def test_questions_are_spread_and_never_calibrated_on() -> None:
    asked = demo_questions()
    read_before = {chat[-1]["content"] for chat in bundled("demo") if not isinstance(chat, str)}
    assert len(asked) > 3000 and not read_before & {one.answer for one in asked}
    few = sample(asked, 7)
    assert few == sample(asked, 7) and [one.seen for one in few] == [True] * 4 + [False] * 3
    assert spread(range(10), 3) == [1, 5, 8] and spread([1, 2], 5) == [1, 2] and spread([1], 0) == []
    assert sample([FactQuestion("q", "a", True)], 6) == [FactQuestion("q", "a", True)]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("", "has no question"),
        ("{", "not understood"),
        ('["a"]', "not understood"),
        ('{"question": "q"}', "'answer'"),
        (b"\xff\xfe\x00", "not understood"),
        ('{"question": "q", "answer": "a", "split": "unknown"}', "has no question"),
    ],
)
def test_bad_question_files(content: str | bytes | None, why: str, tmp_path: Path) -> None:
    file = tmp_path / "facts.jsonl"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SettingError, match=why):
        from_file(file)


def test_bad_texts(tmp_path: Path) -> None:
    (tmp_path / "picture.txt").write_bytes(b"\xff\xd8\xff\xe0\x00")
    for name, why in (("picture.txt", "not a text in UTF-8"), ("nowhere.txt", "no file or folder")):
        with pytest.raises(SettingError, match=why):
            read(tmp_path / name)


def whole(plain: Any, ids: list[int]) -> torch.Tensor:
    """transformers' log-probabilities [n, V] of one pass over everything."""
    with torch.inference_mode():
        logits: torch.Tensor = plain(input_ids=torch.tensor([ids])).logits[0]
        return logits.float().log_softmax(-1)


def by_hand(plain: Any, before: list[int], ids: list[int]) -> tuple[float, bool]:
    rows = whole(plain, before + ids)[len(before) - 1 : -1]
    return float(rows[range(len(ids)), ids].sum()), rows.argmax(-1).tolist() == ids


def test_likelihood_of_a_continuation(engine: Engine, plain: Any) -> None:
    scorer, code = Scorer(engine), engine.prompt.tokenizer
    for context, continuation, before, ids in (
        ("The sky is", " blue", "The sky is", " blue"),
        ("The sky is  ", "blue", "The sky is", "  blue"),
        ("", "blue", "", "blue"),
    ):
        said = scorer.loglikelihood(context, continuation)
        first = code(before, add_special_tokens=False).input_ids or [scorer.start]
        exact = by_hand(plain, first, code(ids, add_special_tokens=False).input_ids)
        assert said[0] == pytest.approx(exact[0], abs=1e-3) and said[1] == exact[1]
    pieces = engine.generate("The sky", Sampling(max_new_tokens=3))
    greedy = [piece.token for piece in pieces if piece.token is not None]
    assert scorer.of(code("The sky").input_ids, greedy)[1] and not scorer.of(code("The sky").input_ids, [7, 8])[1]


def test_long_texts(engine: Engine, plain: Any) -> None:
    scorer, text = Scorer(engine), "abcdefgh" * 12  # 96 tokens; the context holds 64
    ids = scorer.encode(text)
    last = by_hand(plain, ids[-63:], scorer.encode("!"))
    assert scorer.loglikelihood(text, "!")[0] == pytest.approx(last[0], abs=1e-3)
    first, rest = by_hand(plain, [scorer.start], ids[:63]), by_hand(plain, ids[62:63], ids[63:])
    assert scorer.rolling(text) == pytest.approx(first[0] + rest[0], abs=2e-3)
    with pytest.raises(ContextError, match="has 96 tokens, but the context holds 64"):
        scorer.of([1], ids)


def test_generating_until_a_stop(engine: Engine) -> None:
    heard, scorer = list[Any](), Scorer(engine)
    full = scorer.generate_until("Once upon", [], 12)
    stop = next(letter for letter in full[1:] if letter != "\ufffd" and letter != full[0])  # a whole character
    listening = Scorer(engine, heard=heard.append)
    assert listening.generate_until("Once upon", [stop, "never said"], 12) == full[: full.find(stop)]
    assert 1 < len(heard) < 12
    assert len(scorer.generate_until("x" * 200, [], 8)) > 0  # the context loses its beginning
    cancel = threading.Event()
    cancel.set()
    with pytest.raises(Cancelled):
        Scorer(engine, cancel).generate_until("Once", [], 4)


@pytest.mark.skipif(find_spec("lm_eval") is not None, reason="lm-evaluation-harness is installed")
def test_without_the_harness_the_error_says_how_to_get_it(engine: Engine) -> None:
    with pytest.raises(SettingError, match=r"not installed .* -m pip install \"lm-eval"):
        adapter(Scorer(engine))


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-evaluation-harness, an optional extra, is not installed")
def test_a_task_of_ones_own_gives_the_scorers_figures(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    colours = ["red", "green", "blue"]
    rows: list[dict[str, Any]] = [{"question": f"Word {i} is", "choices": colours, "label": i % 3} for i in range(5)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (tmp_path / "words.yaml").write_text(
        f"""task: words_of_our_own
dataset_path: json
dataset_kwargs:
  data_files:
    test: {(tmp_path / "rows.jsonl").as_posix()}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list:
  - metric: acc
""",
        encoding="utf-8",
    )
    scorer = Scorer(engine)
    found = run_tasks(scorer, ["words_of_our_own"], tmp_path)
    right = []
    for row in rows:
        scores = [scorer.loglikelihood(row["question"], f" {choice}")[0] for choice in row["choices"]]
        right.append(scores.index(max(scores)) == row["label"])
    assert found["words_of_our_own"]["acc"] == pytest.approx(sum(right) / 5)
    with pytest.raises(SettingError, match=f"no task 'nope'.*{sys.executable}"):
        run_tasks(scorer, ["nope"])
    with pytest.raises(SettingError, match="no folder"):
        run_tasks(scorer, ["words_of_our_own"], tmp_path / "nowhere")
