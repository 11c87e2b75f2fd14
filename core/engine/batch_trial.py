"""Tests whether a loaded model computes several sequences in one pass as it computes each of them alone.

A pass over several sequences (core.hf.packed) divides what mixes tokens by rules that fit the models they were written
for. So before sequences of some length are first computed together, a few are computed both ways and their logits are
compared: prompts of different lengths, read and continued, and sequences on both sides of each length at which the
model may compute otherwise (windows, chunks, selected positions, scaled rotations). In the reference arithmetic they
may differ by rounding, in the fast one by no bit. What such a sequence holds before that length is noise in its KV
cache, so that a trial costs some ten passes over a few rows, however long the sequences. Experts compute row by row and
are left out: no weight is fetched.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from core.engine.loading import LoadedModel
from core.errors import DeviceError, ModelError
from core.runtime.batch import Batch, Share
from core.runtime.kv_pool import KVPool
from core.runtime.out_of_memory import faulted, shortage
from core.runtime.pipeline import HookedModel, Stopped
from core.runtime.sequence_kv import SequenceKV
from core.system.text_config import text_config
from core.types import Phase

log = logging.getLogger("moestro.batch")

BOUNDS = {4: 5e-5, 2: 0.05}
"""Largest difference of logits that rounding explains, as a share of the largest logit, by bytes of a number: products
of other numbers of rows add in another order."""
TOGETHER = BOUNDS[4]
LENGTHS = re.compile(r".*(window|chunk|topk|top_k|budget|kernel|conv|extent|floor|stride|original_max_position).*")
"""Names of config values that may be a number of positions from which on a model computes otherwise. One that is
something else costs a trial."""
NEW = (7, 1, 12)  # tokens of prompts that are read together
LEAST = 3  # positions: shorter ones the prompts that are read together cross
MORE = 4  # tokens that lead a sequence across a length
TEXT = "On 12 May the ferry left at dawn; by noon, 7 of its passengers had asked (twice!) where it was going."

ALONE = "This model answers prompts one at a time: {}."
LONG = "Prompts that may grow beyond {:,} tokens with their answers are answered one at a time: {}."
DIFFERS = (
    "computed together, its logits differ from those of each prompt alone by {:.1g} of the largest one, where rounding "
    "explains {:g}"
)
STOPS = "its code cannot compute several prompts in one pass"


class BatchTrial:
    """Of one load, for the holder of its lock. `pool` must have room for the sequences that are tried."""

    def __init__(self, loaded: LoadedModel, hooked: HookedModel, pool: KVPool) -> None:
        self._loaded, self._hooked, self._pool = loaded, hooked, pool
        self._untried = [0, *special_lengths(loaded.model.config)]  # 0: prompts that begin
        self._most: int | None = None  # positions of sequences that may be computed together; None: no limit is known
        self.waits = False  # there was no memory for a trial: it is due before a sequence takes any
        self.reason = ""
        """Why the model's prompts, or long ones, are answered one at a time, for the user; "" = no reason is known."""

    def allows(self, positions: int, stop: Callable[[], bool] = lambda: False) -> bool:
        """Whether sequences of up to so many positions may be computed in one pass; tries what was not tried yet.
        `stop` is asked before each MoE layer; then nothing is decided, and the answer is no. Raises DeviceError."""
        due = [length for length in self._untried if length < positions]
        self.waits = False
        try:
            problem = self._problem(due, stop) if due and self._most is None else ""
            if problem == "":
                self._untried = [length for length in self._untried if length not in due]
                due = []
            for length in due:  # which of them it is
                problem = self._problem([length], stop)
                if problem is None:
                    self.waits = True
                    return False
                if problem:
                    self._limit(length, problem)
                    break
                self._untried.remove(length)
        except Stopped:
            return False
        return self._most is None or positions <= self._most

    def _limit(self, length: int, problem: str) -> None:
        self._most = length
        self.reason = LONG.format(length, problem) if length else ALONE.format(problem)
        log.warning("%s", self.reason)

    # ------------------------------------------------------------------ a trial

    def _problem(self, lengths: Sequence[int], stop: Callable[[], bool]) -> str | None:
        """Why sequences on both sides of these lengths cannot be computed together; "" = they can, None = there is no
        memory to try it now."""
        bound = BOUNDS.get(self._loaded.plan.dtype.itemsize, BOUNDS[2])
        if self._hooked.program is not None:
            bound = 0.0  # one function, whatever goes along
        try:
            off = self._difference(lengths, stop)
        except (Stopped, DeviceError):
            raise
        except Exception as error:  # the model's own code, run in a way that it was not written for
            if shortage(error):
                return None
            if self._loaded.device.type == "cuda" and faulted(error):
                raise DeviceError.of(error) from error
            log.info("several sequences in one pass: %s: %s", type(error).__name__, error)
            return str(error).rstrip(".") if isinstance(error, ModelError) else STOPS
        return off if off is None else DIFFERS.format(off, bound) if off > bound else ""

    @torch.inference_mode()
    def _difference(self, lengths: Sequence[int], stop: Callable[[], bool]) -> float | None:
        """The largest difference of logits between both ways, as a share of the largest logit; None where there is no
        memory for it."""
        first, *others = [(0, count) for count in NEW]
        long = [(length - 2, MORE) for length in lengths if length]
        tried = [Tried(past, self._ids(at, count)) for at, (past, count) in enumerate((first, *long, *others))]
        with self._hooked.dispatch.to(_no_experts, stop):
            together = self._logits(tried)
            alone = [self._logits([one]) for one in tried]
        if together is None or None in alone:
            return None
        own = [row for one in alone if one is not None for row in one[0]]
        return max(_off(*both) for both in zip(own, itertools.chain(*together), strict=True))

    def _logits(self, tried: Sequence[Tried]) -> list[list[torch.Tensor]] | None:
        """Of each sequence the logits [V] after its new tokens and after one more, computed in one pass each."""
        taken = [self._pool.take(one.past + len(one.ids)) for one in tried]
        kvs = [kv for kv in taken if kv is not None]
        try:
            if len(kvs) < len(tried):
                return None
            for one, kv in zip(tried, kvs, strict=True):
                self._lead(one, kv)
            read = self._pass("prefill", [Share(one.ids[:-1], kv) for one, kv in zip(tried, kvs, strict=True)])
            turned = [Share(one.ids[-1:], kv) for one, kv in zip(tried[::-1], kvs[::-1], strict=True)]
            decoded = self._pass("decode", turned)[::-1]  # in another order: no result depends on it
            return [[*both] for both in zip(read, decoded, strict=True)]
        finally:
            for kv in kvs:
                self._pool.give_back(kv)

    def _lead(self, one: Tried, kv: SequenceKV) -> None:
        """Fill the cache with what comes before the new tokens: some are computed, then noise like it follows."""
        if one.past:
            first = min(one.past, len(one.ids))
            self._pass("prefill", [Share(one.ids[:first], kv)])
            kv.memory.lengthen(kv, one.past - first)

    def _pass(self, phase: Phase, shares: Sequence[Share]) -> list[torch.Tensor]:
        logits = self._hooked.compute(Batch(phase, tuple(shares)))
        return [row.float().clone() for row in logits]

    def _ids(self, at: int, count: int) -> list[int]:
        """`count` tokens to read, and one more."""
        tokenizer = self._loaded.prompt.tokenizer
        known = tokenizer(TEXT, add_special_tokens=False, verbose=False).input_ids or [0]
        return [known[(5 * at + step) % len(known)] for step in range(count + 1)]


class Tried(NamedTuple):
    """A sequence of a trial: `ids` follow `past` other tokens; the last one is decoded."""

    past: int
    ids: list[int]


def special_lengths(config: Any) -> list[int]:
    """Numbers of positions from which on a model of this config may compute otherwise, in order."""
    if config.is_encoder_decoder:  # reads a prompt in one pass, with positions that are relative
        return []
    return sorted({value for name, value in _numbers(text_config(config).to_dict()) if LENGTHS.fullmatch(name)})


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        for one in value if isinstance(value, list) else [value]:
            if type(one) is int and one >= LEAST:
                yield name, one


def _no_experts(layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """In place of experts, which compute row by row whichever rows there are: what they are given."""
    return hidden


def _off(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """The largest difference of two rows of logits [V], as a share of the largest: infinite where only one is not a
    number."""
    if bool(ours.isnan().all()) and bool(theirs.isnan().all()):  # of a pass that has no logits
        return 0.0
    off = float((ours - theirs).abs().max() / ours.abs().max())
    return math.inf if math.isnan(off) else off
