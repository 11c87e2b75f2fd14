"""Answers that continue from a kept KV: their logits are bit for bit those of transformers making the same passes.

The reference replays every pass that led to what was continued, also those of earlier answers, on transformers' own
cache, and cuts it with transformers' own `crop`. Against reading the prompt anew the difference is rounding.
"""

import itertools
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.decoded import greedy
from tests.equality.passes import plain_transformers
from tests.equality.test_logits import load
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CUT = ("qwen3_moe", "deepseek_v3", "deepseek_v32")  # attention, latent attention, selected positions
WINDOW = ("gpt_oss", "exaone_moe")  # of 32 and of 12 tokens
STATE = ("qwen3_next", "lfm2_moe", "granitemoehybrid", "nemotron_h", "inkling_text")
WHOLE = ("jamba",)  # reads every prompt in one pass
QUICK = ("gpt_oss",)  # states: test_fast_states.py
ROUNDING = 2e-3  # of the largest logit: fp32 sums in another order, through three layers


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(3, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Text:
    """What was computed, and in which passes."""

    ids: list[int]
    passes: list[tuple[list[int], int]]  # the ids of a pass, and how many tokens were left after it

    def first(self, length: int) -> list[tuple[list[int], int]]:
        """The passes that led to its first `length` tokens; the last of them is cut if it has more."""
        found: list[tuple[list[int], int]] = []
        for ids, left in self.passes:
            if found and found[-1][1] >= length:
                break
            found.append((ids, left))
        return [*found[:-1], (found[-1][0], length)] if found and length else []


class Talk:
    """An engine, the reference, and how each kept text was computed."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.engine, self.plain = engine, plain_transformers(path, torch.float32)
        self.selects = hasattr(self.plain.config, "index_topk")
        self.kept: Any = engine.parts.memory.prefix_cache
        self._lineage: list[tuple[Any, Text]] = []  # kept text -> how it was computed
        self._from: tuple[Any, int] | None = None
        taken = self.kept._taken

        def noted(text: Any, held: Any, reach: Any) -> Any:
            self._from = text, reach.length
            return taken(text, held, reach)

        self.kept._taken = noted

    def ask(self, ids: Sequence[int], count: int = 4, stop: int | None = None) -> tuple[list[int], int]:
        """(the text after it, the tokens taken over); compares every logit. `stop`: cancelled after so many tokens."""
        cancel, seen, said, widths = threading.Event(), list[torch.Tensor](), list[int](), list[int]()
        self._from, steps, cached = None, [], 0
        for piece in self.engine.generate(Ids(ids), Sampling(max_new_tokens=count), cancel, greedy(seen), reuse=True):
            if piece.step is not None and (not steps or steps[-1] is not piece.step):
                steps.append(piece.step)
            if piece.kind == "prefill":
                cached = piece.cached
            if piece.token is not None:
                said.append(piece.token)
            if len(said) == stop:
                cancel.set()
        widths = [step.tokens for step in steps]
        whole, at = [*ids, *said], cached
        before = next((one.first(cached) for text, one in self._lineage if self._from and text is self._from[0]), [])
        assert (self._from[1] if self._from else 0) == cached == steps[0].cached_tokens
        passes = list(before)
        for width in widths:
            passes.append((whole[at : at + width], at + width))
            at += width
        want = self._replayed(passes)[len(before) :]
        first = next(i for i, (_, left) in enumerate(passes[len(before) :]) if left >= len(ids))
        assert len(seen) == len(want[first:])
        for ours, theirs in zip(seen, want[first:], strict=True):
            assert (ours - theirs).abs().max().item() == 0.0
        anew = self._replayed([(list(ids), len(ids))])[0]
        # where positions are selected, rounding may select another one: then plain transformers, too, says something
        # else after reading these prompts in two pieces
        assert self.selects or (seen[0] - anew).abs().max() <= ROUNDING * anew.abs().max()
        kv = self.engine.wiring.kv
        assert kv.bytes == sum(layer.growing_bytes + layer.state_bytes for layer in kv._own), "what was allocated"
        if len(self.kept):
            self._lineage.append((self.kept._texts[-1], Text(whole[:at], passes)))
        return whole, cached

    @torch.inference_mode()
    def _replayed(self, passes: Sequence[tuple[list[int], int]]) -> list[torch.Tensor]:
        """[V] the logits after each pass."""
        cache, found, held = DynamicCache(config=self.plain.config), [], 0
        for ids, left in passes:
            out = cached_pass(self.plain, torch.tensor([ids]), cache, logits_to_keep=1).logits[0]
            found.append(out[-1].clone())
            held += len(ids)
            if left < held:
                cache.crop(left - held)
                held = left
        return found


@pytest.fixture(scope="module")
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def talk(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talk]:
    torch.set_num_threads(1)
    path = save_tokenizer(make_checkpoint(arch, tmp_path_factory.mktemp(arch)))
    engine = load(path, "float32", context=256)
    engine.prompt.ends = set()
    yield Talk(path, engine)
    engine.unload()


ARCHS = layered(CUT + WINDOW + STATE + WHOLE, quick=lambda arch: arch in QUICK)


@pytest.mark.parametrize("arch", ARCHS, indirect=True)
def test_turns_answers_written_again_edits_and_two_chats(arch: str, talk: Talk) -> None:
    talk.engine.change({"kv_chats": 0})
    talk.engine.change({"kv_chats": 4})
    cuts, whole = arch in CUT, arch in WHOLE
    a, b = tokens(20, 1), tokens(14, 2)
    first, cached = talk.ask(a, 6)
    assert cached == 0
    other, _ = talk.ask([*a[:3], *b], 5)  # another chat with the same beginning
    prompt = [*first, *tokens(7, 3)]
    _, cached = talk.ask(prompt, 6)
    assert cached == (0 if whole else len(first) - 1), "the next turn: all that was computed"
    again, cached = talk.ask(prompt, 6)
    assert cached == (0 if whole else len(prompt) - 1 if cuts else len(first) - 1), "written again"
    _, cached = talk.ask([*a[:12], *tokens(9, 4)], 4)
    assert cached == (12 if cuts else 3 if arch == "gpt_oss" else 0), "an edit in the middle"  # 3: of the other chat
    _, cached = talk.ask([*other, *tokens(5, 5)], 4)
    assert cached == (0 if whole else len(other) - 1), "the other chat"
    talk.engine.fresh_cache()  # a measurement takes the memory
    _, cached = talk.ask([*again, *tokens(40, 6)], 4)
    assert cached == (0 if whole else len(again) - 1), "from host memory"
    talk.engine.expert_cache.check_integrity()
    assert talk.engine.memory().kv <= talk.engine.sizes.kv


@pytest.mark.parametrize("arch", ARCHS, indirect=True)
def test_stopped_in_the_middle_and_gone_on(arch: str, talk: Talk) -> None:
    a = tokens(18, 11)
    text, _ = talk.ask(a, 20, stop=3)
    assert len(text) == len(a) + 3
    for _ in range(2):
        ids = [*text, *tokens(4, 12)]
        text, cached = talk.ask(ids, 20, stop=2)
        assert cached == (0 if arch in WHOLE else len(ids) - 4 - 1)


@pytest.mark.parametrize(
    "arch", layered(("gpt_oss", "qwen3_next"), quick=lambda arch: arch == "qwen3_next"), indirect=True
)
def test_a_pass_that_breaks_off_in_a_layer(arch: str, talk: Talk) -> None:
    """Its tokens are cut away, or what cannot be cut is taken from before it."""
    a, site = tokens(24, 21), talk.engine.loaded.sites[-1].module
    text, _ = talk.ask(a, 6)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with site.register_forward_pre_hook(fail), pytest.raises(ZeroDivisionError):
        list(talk.engine.generate(Ids([*text, *tokens(9, 22)]), reuse=True))
    kept = talk.kept._texts[-1]
    talk._lineage.append((kept, talk._lineage[-1][1]))
    assert kept.ids.tolist() == text[:-1]
    _, cached = talk.ask([*text, *tokens(9, 23)], 4)
    assert cached == len(text) - 1


MOVES = st.lists(
    st.tuples(st.sampled_from("append again edit stop move other".split()), st.integers(0, 99), st.integers(1, 9)),
    min_size=2,
    max_size=7,
)


@pytest.mark.parametrize(
    "arch", layered(("qwen3_moe", "gpt_oss", "qwen3_next"), quick=lambda arch: False, minutes=0.5), indirect=True
)
@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(moves=MOVES)
def test_any_sequence_of_turns(arch: str, talk: Talk, moves: list[tuple[str, int, int]]) -> None:
    talk.engine.change({"kv_chats": 0})
    talk.engine.change({"kv_chats": 2})
    asked, seeds = [tokens(10, 31)], itertools.count(32)
    texts = [talk.ask(asked[0], 3)[0]]
    for kind, at, size in moves:
        text = texts[at % len(texts)]
        ids = {
            "again": asked[at % len(asked)],
            "edit": [*text[: 1 + at % len(text)], *tokens(size, next(seeds))],
            "other": tokens(size, next(seeds)),
        }.get(kind, [*text, *tokens(size, next(seeds))])
        if kind == "move":
            talk.engine.fresh_cache()
        if len(ids) < 200:
            asked.append(ids)
            texts.append(talk.ask(ids, 3, stop=1 if kind == "stop" else None)[0])
