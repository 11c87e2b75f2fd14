"""Try what an engine does with a loaded model beside computing its logits: answers, kept KV, batches, the lab's
recording, and the fast arithmetic."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import DynamicCache

from core.engine import Engine
from core.engine.batch_trial import TOGETHER
from core.hf.cached_pass import cached_pass, with_chosen_rows
from core.settings.sampling import Sampling
from core.types import Ids
from tests.architectures.methods import YES, tried
from tests.architectures.turns import PROMPTS, STEPS, Logits, together
from tests.decoded import greedy
from tests.loaded import loaded
from tests.switch import generated

TITLES = ("answers", "kept KV", "batches", "lab", "fast")
"""The columns, in order. Each trial finds `YES`, or words that say what happens instead."""
CLOSE = 1e-4  # of the largest logit: the fast arithmetic's sums in fp32 have another order
PIECES = 2e-3  # of the largest logit: what is computed in other pieces is rounded elsewhere; it is 0 without a kept KV

Result = TypeVar("Result")


def try_features(engine: Engine, plain: Any) -> dict[str, str]:
    """What is found, by column. `plain` = transformers' own model.."""
    trials: tuple[Callable[[], str], ...] = (
        lambda: _answers(engine, plain),
        lambda: _kept(engine, plain),
        lambda: _batches(engine),
        lambda: _lab(engine),
        lambda: fast(engine.model_name, plain),
    )
    return {title: tried(trial) for title, trial in zip(TITLES, trials, strict=True)}


def _answers(engine: Engine, plain: Any) -> str:
    got = _answer(engine, PROMPTS[0])[1]
    if engine.text_to_text:
        return _compared(torch.stack(got), generated(plain, PROMPTS[0], STEPS)[1], 0.0)
    return _compared(torch.stack(got), torch.stack(_own(plain, PROMPTS[0])), engine.closeness)


def _kept(engine: Engine, plain: Any) -> str:
    """A chat that goes on, and one that is edited: from what is kept, and anew."""
    if engine.text_to_text:
        return "each text is read anew"
    _, first = _answer(engine, PROMPTS[3], reuse=True)
    answer = [int(row.argmax()) for row in first]
    more, edited = [*PROMPTS[3], *answer, *PROMPTS[1]], [*PROMPTS[3][:20], *PROMPTS[1]]
    cached, got = _answer(engine, more, reuse=True)
    if not cached:
        return "nothing is taken over"
    found = _compared(torch.stack(got), torch.stack(_answer(engine, more)[1]), PIECES)
    pieces = [PROMPTS[3], *([token] for token in more[len(PROMPTS[3]) : cached]), more[cached:]]
    if found != YES and _compared(got[0], _own(plain, *pieces)[0], PIECES) == YES:
        found = "other logits than read anew, as in transformers reading the same pieces: other positions are selected"
    if found != YES:
        return found
    return _compared(
        torch.stack(_answer(engine, edited, reuse=True)[1]), torch.stack(_answer(engine, edited)[1]), PIECES
    )


def _batches(engine: Engine) -> str:
    alone = [_answer(engine, prompt)[1] for prompt in PROMPTS]
    own, others = [torch.cat([torch.stack(rows) for rows in texts]) for texts in (alone, together(engine, PROMPTS))]
    found = _compared(others, own, TOGETHER)
    return engine.one_at_a_time if found == YES and engine.one_at_a_time else found


def _lab(engine: Engine) -> str:
    wanted = torch.stack(_answer(engine, PROMPTS[0])[1])
    got = _with(engine, {"telemetry": "lab"}, lambda: torch.stack(_answer(engine, PROMPTS[0])[1]))
    return _compared(got, wanted, 0.0)


def _with(engine: Engine, settings: Mapping[str, object], trial: Callable[[], Result]) -> Result:
    before = {name: engine.settings[name] for name in settings}
    engine.change(settings)
    try:
        return trial()
    finally:
        engine.change(before)


def fast(path: str, plain: Any) -> str:
    """An answer in the fast arithmetic, and the bits of the same from a kept KV."""
    with loaded(path, {"budget": "50%"}, arithmetic="fast", dtype="float32", context=128) as engine:
        if not engine.arithmetic.fast:
            return f"the reference computes: {engine.arithmetic.fallback}"
        got = torch.stack(_answer(engine, PROMPTS[0], reuse=True)[1])
        if (same := _compared(got, torch.stack(_own(plain, PROMPTS[0])), CLOSE)) != YES:
            return same
        if engine.arithmetic.fallback:
            return f"only the experts: {engine.arithmetic.fallback}"
        return _compared(torch.stack(_answer(engine, PROMPTS[0], reuse=True)[1]), got, 0.0)


def _answer(engine: Engine, prompt: Sequence[int], *, reuse: bool = False) -> tuple[int, Logits]:
    """(tokens that were taken over, the logits [V] of each token) of a greedy answer."""
    logits, cached = Logits(), 0
    for piece in engine.generate(Ids(prompt), Sampling(max_new_tokens=STEPS), draw=greedy(logits), reuse=reuse):
        cached = piece.stats.cached_tokens if piece.stats is not None else cached
    return cached, logits


@torch.inference_mode()
def _own(plain: Any, *pieces: list[int]) -> Logits:
    """transformers' own of a prompt that it reads in pieces."""
    with_chosen_rows(plain)  # or the last row would be computed with all others
    cache, (*before, ids), found = DynamicCache(config=plain.config), pieces, Logits()
    for piece in before:
        cached_pass(plain, torch.tensor([piece]), cache)
    for _ in range(STEPS):
        found.append(cached_pass(plain, torch.tensor([ids]), cache, logits_to_keep=1).logits[0, -1].clone())
        ids = [int(found[-1].argmax())]
    return found


def _compared(got: torch.Tensor, wanted: torch.Tensor, bound: float) -> str:
    off = float((got - wanted).abs().max() / wanted.abs().max()) if got.shape == wanted.shape else float("inf")
    return YES if off <= bound else f"other logits, by {off:.1g} of the largest"
