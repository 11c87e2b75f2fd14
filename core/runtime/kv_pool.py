"""The KV memory that the budget reserved, divided among several sequences: each gets the positions that it can need."""

from collections.abc import Callable
from typing import Protocol

from transformers import PreTrainedModel

from core.runtime.kv_cache import KVCache
from core.runtime.sequence_kv import SequenceKV


class HasBytes(Protocol):
    """Device memory of some use."""

    @property
    def bytes(self) -> int:
        """Allocated now."""


class KVPool:
    """For one model. `room` bytes are divided; `bytes_of(positions)` = what a sequence takes. `chat` is the memory that
    answers to one chat at a time use: it is dropped while others have theirs, and what it kept waits in host memory."""

    def __init__(
        self, model: PreTrainedModel, chat: KVCache, room: int, bytes_of: Callable[[int], int], context: int
    ) -> None:
        self.chat, self.context = chat, context
        self._model, self._room, self._bytes_of = model, room, bytes_of
        self._taken: dict[KVCache, int] = {}  # bytes of each that is in use
        self.chatting = False  # an answer uses the chats' memory while others use theirs
        self.drafts: list[HasBytes] = []  # keys and values of what drafts tokens

    @property
    def bytes(self) -> int:
        """Device bytes allocated now. May be read from any thread."""
        others = sum([memory.bytes for memory in tuple(self._taken)]) if self._taken else 0
        return self.chat.bytes + others + (sum([one.bytes for one in self.drafts]) if self.drafts else 0)

    @property
    def has_chat_room(self) -> bool:
        """Whether a chat's memory fits next to what others have taken."""
        return not self.chatting and sum(self._taken.values()) + self._bytes_of(self.context) <= self._room

    def take(self, positions: int) -> SequenceKV | None:
        """Memory for a sequence of up to so many positions; None while others have taken too much. The first always
        gets it: `positions` is at most the context, which is what was reserved."""
        if not self._taken and not self.chatting:
            self.chat.drop()
        need = self._bytes_of(positions)
        chat = self._bytes_of(self.context) if self.chatting else self.chat.bytes
        if (self._taken or self.chatting) and chat + sum(self._taken.values()) + need > self._room:
            return None
        memory = KVCache(self._model, positions)
        self._taken[memory] = need
        return memory.fresh()

    def give_back(self, kv: SequenceKV) -> None:
        """A sequence has ended."""
        if kv.memory is self.chat:
            self.chatting = False
            return
        del self._taken[kv.memory]
        kv.memory.release()

    def clear(self) -> None:
        """All sequences have ended."""
        self.chatting = False
        for memory in tuple(self._taken):
            del self._taken[memory]
            memory.release()
