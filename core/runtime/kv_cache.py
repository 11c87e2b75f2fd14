"""The KV cache, of the size that the budget reserved: allocated in the first pass and then reused. What it holds can be
copied to host memory, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from core.hf.cache import reserve
from core.hf.reserved_layers import CPU, Fixed, Held, Part, Reserved
from core.hf.reserved_tensor import Allocated
from core.hf.text_to_text import empty_cache
from core.runtime.kv_copies import Stash, StateCheckpoint
from core.runtime.sequence_kv import SequenceKV


class KVCache:
    """Memory for keys, values and recurrent states of every layer of `model`, for `context` positions: of one sequence
    at a time, the `holder`."""

    def __init__(self, model: PreTrainedModel, context: int) -> None:
        self._config, self.context = model.config, context
        cache = empty_cache(self._config)
        self._allocated = Allocated()
        self._reserved = reserve(cache, context, self._allocated)
        self._behind = 0  # positions that passes by address have written, and that the layers do not count yet
        self._held: tuple[Held, ...] = ()  # the memory of such passes, while it is allocated
        self._written = 0  # positions that one of them may have written, and that are no tokens yet
        self._unsettled: tuple[int, Callable[[int], None]] | None = None  # as `hold` has them
        self._given = [layer for layer in self._own if layer.given]
        self._layers = cache.layers
        self.holder: SequenceKV | None = None
        self.before_taken: Callable[[SequenceKV], None] = lambda holder: None
        """Called before the memory is taken from its holder, which may still be copied then."""

    def catch_up(self) -> None:
        """Have the layers count every position that was written."""
        self.settle()
        if self._behind:
            count, self._behind = self._behind, 0
            for layer in self._reserved:
                layer.grow(count)

    @property
    def _own(self) -> list[Reserved]:
        """The layers, which count every position."""
        self.catch_up()
        return self._reserved

    @torch.inference_mode()
    def like(self, other: KVCache) -> None:
        """Before it was ever used: what was stashed from `other`, of the same model, may be put back here."""
        for layer, theirs in zip(self._own, other._own, strict=True):
            layer.like(theirs)

    @torch.inference_mode()
    def fresh(self) -> SequenceKV:
        """The memory, emptied, for a sequence to begin or to start over. Its holder loses what was there."""
        self._take()
        self._written, self._unsettled = 0, None
        for layer in self._own:
            layer.clear()
        return self._new()

    @torch.inference_mode()
    def drop(self) -> None:
        """Give back the memory of what grows with the context, until it is needed again. Its holder loses it."""
        self._take()
        self.holder, self._held, self._written, self._unsettled = None, (), 0, None
        for layer in self._own:
            layer.drop()

    def _take(self) -> None:
        if self.holder is not None:
            self.before_taken(self.holder)
            self.holder.give_up()

    # ------------------------------------------------------------------ passes without the host

    def allocated(
        self, kv: SequenceKV, parts: Sequence[Sequence[Part]], count: int, device: torch.device = CPU
    ) -> tuple[Held, ...]:
        """Have memory on a device for the parts that each layer keeps of the holder, before a pass writes those of
        `count` more positions by address."""
        assert kv is self.holder
        self._written = count
        if not self._held:
            for layer, own in zip(self._own, parts, strict=True):
                layer.allocate(own, device)
            self._held = self.held()
        return self._held

    def fixable(self) -> bool:
        """Whether all layers can be used as `Fixed` says, now: full attention, whose memory is allocated."""
        return bool(self._own) and all(layer.fixable for layer in self._own)

    def held(self) -> tuple[Held, ...]:
        """Where the memory of each layer is that such passes use."""
        return tuple([layer.held() for layer in self._own])

    @contextmanager
    def fixed(self, how: Fixed) -> Iterator[None]:
        """Inside, a pass writes at a position on the device, and its sequence does not grow."""
        for layer in self._own:
            layer.fixed = how
        try:
            yield
        finally:
            for layer in self._own:
                layer.fixed = None

    def lengthen(self, kv: SequenceKV, count: int) -> None:
        """Append `count` positions of noise to the holder, the same for the same numbers before them: for trials of
        what depends on a length. States stay as they are."""
        assert kv is self.holder
        if count:
            draw = torch.Generator().manual_seed(0)
            for layer in self._own:
                layer.lengthen(count, draw)
            kv.length += count

    def grow(self, kv: SequenceKV, count: int) -> None:
        """Such a pass has written the holder's next `count` positions: they are tokens from now on."""
        assert kv is self.holder
        self._behind += count
        self._written = 0
        kv.length += count

    @property
    def revocable(self) -> int:
        """How many of the last positions that such passes have written can be taken back."""
        return min([layer.revocable for layer in self._reserved], default=0)

    def take_back(self, kv: SequenceKV, count: int) -> None:
        """The last `count` positions that such a pass has written for the holder are no tokens: at most `revocable`,
        and before anything else is asked of the memory."""
        assert kv is self.holder and count <= self._behind
        self._behind -= count
        kv.length -= count
        if self._unsettled is not None:
            rows, settle = self._unsettled
            self._unsettled = rows - count, settle

    def hold(self, count: int, settle: Callable[[int], None]) -> None:
        """Such a pass has written the last `count` positions, and left states as they were before them: `settle(n)`
        brings these to what they are after its first n."""
        self._unsettled = count, settle

    @property
    def unsettled(self) -> bool:
        """Whether states are those of before the last pass."""
        return self._unsettled is not None

    def settle(self) -> None:
        """What the last pass has written, and was not taken back, stays: bring states to what they are after it."""
        if self._unsettled is not None:
            (rows, settle), self._unsettled = self._unsettled, None
            settle(rows)

    def release(self) -> None:
        """Give the memory up for good, when the model is unloaded: its holder loses its KV."""
        if self.holder is not None:
            self.holder.give_up()
        self.holder, self._held, self._written, self._unsettled = None, (), 0, None
        self._own.clear()
        self._given.clear()
        self._layers.clear()
        self._allocated = Allocated()

    # ------------------------------------------------------------------ what is there already

    def cuttable(self, kv: SequenceKV) -> bool:
        """Whether the holder can be cut to any number of its tokens. One whose last pass broke off is cut to the tokens
        before it, or not at all."""
        assert kv is self.holder
        self._count_written()
        return all(layer.cuttable(kv.length) for layer in self._own)

    def _count_written(self) -> None:
        """Have the layers count what a pass that broke off may have written, so that cutting it away is their task."""
        self._behind, self._written = self._behind + self._written, 0

    @torch.inference_mode()
    def cut(self, kv: SequenceKV, length: int, checkpoint: StateCheckpoint | None = None) -> SequenceKV:
        """The holder, cut to its first `length` tokens, goes on as another sequence's KV. `checkpoint`, of that length,
        puts back what cannot be cut."""
        assert kv is self.holder and length <= kv.length
        assert checkpoint is not None or (kv.whole and length == kv.length) or self.cuttable(kv)
        for layer in self._own:
            layer.cut(length)
        self._put_checkpoint(checkpoint)
        after = self._new()
        after.begin_as(kv, length)
        kv.give_up()
        return after

    @torch.inference_mode()
    def rollback(self, kv: SequenceKV, checkpoints: Sequence[StateCheckpoint] = ()) -> bool:
        """After an aborted pass, restore the tokens of before it. False where that is impossible: what cannot be
        cut is lost, unless one of `checkpoints` is of that length."""
        assert kv is self.holder
        if kv.whole:
            return True
        self._count_written()
        if kv.length == 0:
            for layer in self._own:
                layer.clear()
        else:
            checkpoint = next((one for one in checkpoints if one.length == kv.length), None)
            if checkpoint is None and not self.cuttable(kv):
                return False
            for layer in self._own:
                layer.cut(kv.length)
            self._put_checkpoint(checkpoint)
        kv.whole = True
        return True

    @torch.inference_mode()
    def checkpoint(self, kv: SequenceKV) -> StateCheckpoint | None:
        """A copy of what cannot be cut, or not for long, as it is now; None where there is no such thing, or where it
        is not whole."""
        if not kv.whole or not any(layer.momentary for layer in self._own):
            return None
        return StateCheckpoint(kv.length, tuple([layer.moment() for layer in self._own]))

    @torch.inference_mode()
    def stash(self, kv: SequenceKV) -> Stash:
        """A copy of the holder in host memory."""
        assert kv is self.holder
        checkpoint = StateCheckpoint(kv.length, tuple([layer.moment() for layer in self._own])) if kv.whole else None
        rows = tuple([layer.rows(kv.length) for layer in self._own])
        cuttable = kv.whole and self.cuttable(kv)
        return Stash(kv.length, rows, checkpoint, cuttable, kv.lossy_from, kv.lossy_keys, kv.packed)

    @torch.inference_mode()
    def put_back(self, stash: Stash, length: int, checkpoint: StateCheckpoint | None = None) -> SequenceKV:
        """The memory with the first `length` tokens of a stash; its holder loses what was there. `checkpoint`, of that
        length, stands in for the stash's own where that cannot be cut."""
        assert length <= stash.length
        kv = self.fresh()
        for layer, rows in zip(self._own, stash.layers, strict=True):
            layer.put_rows(iter(rows), length)
        assert checkpoint is not None or length == stash.length or stash.cuttable
        self._put_checkpoint(checkpoint or stash.checkpoint, length if checkpoint is None and stash.cuttable else None)
        kv.begin_as(stash, length)
        return kv

    def _put_checkpoint(self, checkpoint: StateCheckpoint | None, most: int | None = None) -> None:
        if checkpoint is not None:
            for layer, copied in zip(self._own, checkpoint.layers, strict=True):
                layer.put_moment(iter(copied), most)

    def _new(self) -> SequenceKV:
        """A sequence that holds the memory from now on."""
        cache = empty_cache(self._config)
        cache.layers = self._layers
        self.holder = SequenceKV(cache)
        self.holder.memory = self
        return self.holder

    @property
    def bytes(self) -> int:
        """Device bytes allocated now. Cheap: read after every pass."""
        given = sum([layer.given_bytes for layer in self._given]) if self._given else 0
        return self._allocated.bytes + given

    def stash_bytes(self, kv: SequenceKV) -> int:
        """Host bytes that a stash of the holder takes, by what is allocated: windows count as the whole context."""
        return sum([layer.growing_bytes * kv.length // self.context + layer.state_bytes for layer in self._own])
