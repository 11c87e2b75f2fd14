"""Scoring texts for lm-evaluation-harness: likelihoods of a whole forward pass, stops, windows, and the adapter."""

import json
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.errors import ContextError, SettingError
from core.measure.evaluate.harness import adapter, run_tasks
from core.measure.evaluate.scorer import Scorer
from core.memory.store import Cancelled
from core.settings.sampling import Sampling


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
