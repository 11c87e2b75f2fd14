"""KV caches that outlive their answers: the next request continues from the longest beginning it shares with one.

The text used last stays in the device memory of the KV cache, of which there is one. When another request takes that
memory, it is copied to host memory, outside the budget; so is a text that was computed in another memory.
Texts are compared by token ids.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from core.engine.sequence import Start
from core.runtime.kv_cache import KVCache
from core.runtime.kv_copies import Stash, StateCheckpoint
from core.runtime.sequence_kv import SequenceKV
from core.settings.config import Settings
from core.settings.kv import KVSettings
from core.system.process_memory import trim

log = logging.getLogger("moestro.session")

MARGIN = 256 << 20  # host bytes that stay free
Ints = npt.NDArray[np.int64]


class Reach(NamedTuple):
    """How many tokens of a kept text a request can continue from. `checkpoint`: what puts back the part that cannot be
    cut."""

    length: int
    checkpoint: StateCheckpoint | None = None


@dataclass(slots=True, eq=False)
class KeptText:
    """A text that was computed: in the device memory (`kv`) or copied to host memory (`stash`)."""

    ids: Ints  # [length]
    prompt: tuple[int, ...]  # what the request asked that it was computed for
    checkpoints: tuple[StateCheckpoint, ...]
    kv: SequenceKV | None
    stash: Stash | None = None

    @property
    def bytes(self) -> int:
        """Host bytes."""
        return sum(one.bytes for one in self.checkpoints) + (self.stash.bytes if self.stash is not None else 0)

    def shared(self, ids: Ints) -> int:
        """The number of tokens at the beginning of both."""
        n = min(len(self.ids), len(ids))
        differs = self.ids[:n] != ids[:n]
        return int(differs.argmax()) if differs.any() else n


class PrefixCache:
    """The kept texts of one model, the one used last at the end. For the holder of the model lock; `bytes` may be read
    by any thread. `carried`: whether a prompt can continue from a KV at all. `free`: host bytes that are free."""

    def __init__(self, memory: KVCache, settings: KVSettings, carried: bool, free: Callable[[], int]) -> None:
        self._memory, self._carried, self._free = memory, carried, free
        self._limit, self._epoch = settings.chats, 0
        self._texts: list[KeptText] = []
        memory.before_taken = self._move_out

    # ------------------------------------------------------------------ settings and memory

    def configure(self, old: KVSettings, new: KVSettings) -> None:
        """Keep as many as `new` says."""
        self._limit = new.chats
        self._trim()

    def clear(self) -> None:
        """Drop everything; what is being computed lossily now will not be continued either."""
        self._texts.clear()
        self._epoch += 1

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def bytes(self) -> int:
        """Host bytes of all kept texts."""
        return sum(one.bytes for one in tuple(self._texts))

    def lossy_key(self, settings: Settings) -> str:
        """Names the settings by which lossy passes are computed; "" = exactly. What was computed under one key is not
        continued under another."""
        lossy = settings.lossy
        return f"{self._epoch} {lossy!r} {settings.prefetch.predictor!r}" if lossy.active else ""

    # ------------------------------------------------------------------ a request

    def begin(self, ids: Sequence[int], lossy_key: str, memory: KVCache | None = None) -> Start:
        """The device memory for a request whose prompt is `ids`, with as many of its tokens as a kept text has, but
        not the last one: its logits are needed. Tokens computed lossily under another key are not reused. `memory`: of
        the request alone, where the KV cache's own is another's; it has room for the prompt and its answer."""
        memory = memory or self._memory
        if self._texts:
            self._make_room(0)
        asked = np.array(ids, np.int64)
        reaches = (
            [(self._reach(one, asked, lossy_key), at) for at, one in enumerate(self._texts)] if self._carried else []
        )
        reach, at = max(reaches, key=lambda one: (one[0].length, one[1]), default=(Reach(0), 0))
        if not reach.length:
            return Start(memory.fresh())
        text = self._texts[at]
        goes_on = reach.length == len(text.ids) or text.prompt == tuple(ids)  # or its answer is written again
        held, leaves = text.kv, goes_on or self._limit == 1
        if held is not None and not (leaves and memory is self._memory):
            self._move_out(held)
        if leaves and text in self._texts:
            self._texts.remove(text)
        if memory is self._memory:
            return self._taken(text, held, reach)
        if text.stash is None:  # host memory has no room for it
            return Start(memory.fresh())
        memory.like(self._memory)
        return self._taken(text, None, reach, memory)

    def end(self, ids: Sequence[int], prompt: int, kv: SequenceKV, checkpoints: Sequence[StateCheckpoint]) -> None:
        """A request ended, also by an error: keep what `kv` holds of its text `ids`, of which the first `prompt` were
        given."""
        if not self._limit or not self._carried or not kv.held:
            return
        memory = kv.memory
        if not kv.whole and memory.cuttable(kv):  # a pass broke off: without its tokens
            kv = memory.cut(kv, kv.length)
        if not kv.length or not (kv.whole or checkpoints):
            return
        asked = tuple(ids[:prompt])
        self._texts = [one for one in self._texts if one.prompt != asked]  # whose answer was written again
        self._texts.append(KeptText(np.array(ids[: kv.length], np.int64), asked, tuple(checkpoints), kv))
        self._trim()
        if memory is not self._memory:  # which is given back
            self._memory.like(memory)
            self._move_out(kv)

    def _reach(self, text: KeptText, ids: Ints, lossy_key: str) -> Reach:
        most = min(text.shared(ids), len(ids) - 1)
        kv = text.kv if text.kv is not None else text.stash
        assert kv is not None
        if kv.lossy_from is not None and kv.lossy_keys != (lossy_key,):
            most = min(most, kv.lossy_from)
        if isinstance(kv, Stash):
            whole, cuttable = kv.checkpoint is not None, kv.cuttable
        else:
            whole, cuttable = kv.whole, kv.whole and self._memory.cuttable(kv)
        if cuttable or (whole and most == len(text.ids)):
            return Reach(most)
        near = [one for one in text.checkpoints if one.length <= most]
        last = max(near, key=lambda one: one.length, default=None)
        return Reach(last.length, last) if last is not None else Reach(0)

    def _taken(self, text: KeptText, held: SequenceKV | None, reach: Reach, memory: KVCache | None = None) -> Start:
        """The device memory, cut to what is reached. `held`: it holds the text already."""
        memory = memory or self._memory
        if held is not None:
            kv = memory.cut(held, reach.length, reach.checkpoint)
        else:
            assert text.stash is not None
            try:
                kv = memory.put_back(text.stash, reach.length, reach.checkpoint)
            except torch.OutOfMemoryError:  # what it takes beside others' passes; a prompt that is read makes way first
                log.warning("the GPU has no memory left to put a kept text back: it is read anew")
                return Start(memory.fresh())
        return Start(kv, reach.checkpoint or memory.checkpoint(kv))

    # ------------------------------------------------------------------ room

    def _move_out(self, holder: SequenceKV) -> None:
        """The memory is about to be taken: copy the text that it holds, if it is kept and there is room."""
        for text in [one for one in self._texts if one.kv is holder]:
            try:
                if self._make_room(holder.memory.stash_bytes(holder), text):
                    text.stash, text.kv = holder.memory.stash(holder), None
                    continue
            except (RuntimeError, MemoryError) as error:  # torch's allocator raises the first
                log.warning("the KV cache of a chat could not be kept: %s", type(error).__name__)
            self._texts.remove(text)

    def _make_room(self, need: int, of: KeptText | None = None) -> bool:
        """Whether host memory has room for `need` bytes of a text; while it has not, the oldest others are dropped that
        take some."""
        while self._free() - need < MARGIN:
            copied = next((one for one in self._texts if one is not of and one.bytes), None)
            if copied is None:
                return False
            self._texts.remove(copied)
            del copied
            trim()
        return True

    def _trim(self) -> None:
        """Drop what is beyond the limit: first texts half of which, or more, is the beginning of a newer one, such as
        versions of an edited chat; then the oldest."""
        while len(self._texts) > self._limit:
            self._texts.remove(next(filter(self._superseded, self._texts), self._texts[0]))

    def _superseded(self, text: KeptText) -> bool:
        newer = self._texts[self._texts.index(text) + 1 :]
        return any(2 * one.shared(text.ids) >= len(text.ids) for one in newer)
