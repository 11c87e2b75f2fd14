"""A KV memory whose content is the tokens themselves, so that a wrong prefix shows at once, and requests against it."""

from dataclasses import dataclass, field
from typing import Any

import torch

from core.engine.prefix_cache import MARGIN, PrefixCache, Start
from core.runtime.kv_copies import Stash, StateCheckpoint
from core.runtime.sequence_kv import SequenceKV
from core.settings.kv import KVSettings


@dataclass(eq=False)
class FakeMemory:
    """Has the tokens where the real one has keys and values: `cuts`: they can be cut; else they are a state."""

    cuts: bool = True
    holder: SequenceKV | None = None
    content: list[int] = field(default_factory=list)
    before_taken: Any = lambda holder: None
    stashes: int = 0
    used: bool = False  # since it was made, or made like one that was
    full: bool = False  # nothing can be put back: the GPU has no memory left

    def like(self, other: "FakeMemory") -> None:
        self.used = self.used or other.used

    def compute(self, kv: SequenceKV, tokens: list[int]) -> None:
        assert kv is self.holder and kv.held
        self.content, self.used = [*self.content[: kv.length], *tokens], True
        kv.length += len(tokens)

    def fresh(self) -> SequenceKV:
        if self.holder is not None:
            self.before_taken(self.holder)
            self.holder.give_up()
        self.content = []
        return self._held(SequenceKV(object()))  # type: ignore[arg-type]

    def _held(self, kv: SequenceKV) -> SequenceKV:
        self.holder, memory = kv, self
        kv.memory = memory  # type: ignore[assignment]
        return kv

    def cuttable(self, kv: SequenceKV) -> bool:
        return self.cuts

    def cut(self, kv: SequenceKV, length: int, checkpoint: Any = None) -> SequenceKV:
        assert kv is self.holder and (self.cuts or checkpoint is not None or (kv.whole and length == kv.length))
        self.content = (self.content if checkpoint is None else checkpoint.layers[0].tolist())[:length]
        after = SequenceKV(object())  # type: ignore[arg-type]
        after.length, after.lossy_from, after.lossy_keys = kv.length, kv.lossy_from, kv.lossy_keys
        after.cut_to(length)
        kv.give_up()
        return self._held(after)

    def checkpoint(self, kv: SequenceKV) -> Any:
        return None if self.cuts or not kv.whole else self._moment(kv)

    def _moment(self, kv: SequenceKV) -> Any:
        layers: Any = (torch.tensor(self.content),)
        return StateCheckpoint(kv.length, layers)

    def stash_bytes(self, kv: SequenceKV) -> int:
        return kv.length

    def stash(self, kv: SequenceKV) -> Any:
        self.stashes += 1
        layers: Any = (torch.tensor(self.content),)
        return Stash(kv.length, layers, self._moment(kv) if kv.whole else None, self.cuts, kv.lossy_from, kv.lossy_keys)

    def put_back(self, stash: Any, length: int, checkpoint: Any = None) -> SequenceKV:
        kv = self.fresh()
        if self.full:
            self.content = ids = stash.layers[0].tolist()[:1]  # as far as it came
            raise torch.OutOfMemoryError(f"no room beside {ids}")
        assert self.used, "a copy is put where the shapes of what was copied are known"
        assert stash.cuttable or checkpoint is not None or length == stash.length
        self.content = (checkpoint or stash).layers[0].tolist()[:length]
        kv.length, kv.lossy_from, kv.lossy_keys = stash.length, stash.lossy_from, stash.lossy_keys
        kv.cut_to(length)
        return kv


class Kept:
    """Requests against the fake memory. Every text has host bytes, so that memory can run short."""

    def __init__(self, chats: int = 4, *, cuts: bool = True, carried: bool = True) -> None:
        self.memory, self.free = FakeMemory(cuts), 4 * MARGIN
        memory: Any = self.memory
        self.kvs = PrefixCache(memory, KVSettings(chats), carried, lambda: self.free)

    def ask(self, ids: list[int], said: list[int] = [], lossy_key: str = "", fail: bool = False) -> int:  # noqa: B006
        """The tokens that were taken over. `said` is drawn and computed but for its last token."""
        asked = Asked(self, ids, lossy_key)
        asked.answered(said, fail)
        return asked.cached


class Asked:
    """A request under way; `beside`: in a memory of its own, as the KV cache's is another's."""

    def __init__(self, kept: Kept, ids: list[int], lossy_key: str = "", *, beside: bool = False) -> None:
        self.kvs, self.ids, self.lossy_key = kept.kvs, ids, lossy_key
        own: Any = FakeMemory(kept.memory.cuts) if beside else None
        start: Start = self.kvs.begin(ids, lossy_key, own)
        self.memory: FakeMemory = own or kept.memory
        self.kv, self.cached = start.kv, start.kv.length
        assert self.kv is self.memory.holder
        assert self.memory.content[: self.cached] == ids[: self.cached] and self.cached < len(ids)
        self.checkpoints = [start.checkpoint] if start.checkpoint is not None else []
        assert self.memory.cuts or not self.cached or [one.length for one in self.checkpoints] == [self.cached]

    def answered(self, said: list[int], fail: bool = False) -> None:
        kv = self.kv
        self.memory.compute(kv, self.ids[self.cached :])
        if (checkpoint := self.memory.checkpoint(kv)) is not None:
            self.checkpoints.append(checkpoint)
        self.memory.compute(kv, said[:-1])
        if self.lossy_key:
            kv.mark_lossy(self.cached, self.lossy_key)
        if fail:
            kv.whole = False
            self.memory.content += [999]  # what the pass that broke off left
        self.kvs.end([*self.ids, *said], len(self.ids), kv, self.checkpoints)
