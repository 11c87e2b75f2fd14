"""Two ways to compute a head that guesses tokens: its own modules, and the program of the fast arithmetic."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch

from core.hf.head import MtpHead
from core.hf.reserved_tensor import Allocated
from core.runtime.batch import Batch, Share
from core.runtime.kv_cache import KVCache
from core.runtime.program.bind import bind_head
from core.runtime.program.called import Experts
from core.runtime.program.program import Hits, Program


class Guessed(NamedTuple):
    """The head's state [1, H] at the last position of a pass, normed, and the logits [V] of the token after the next
    one."""

    state: torch.Tensor
    logits: torch.Tensor


class HeadPasses(Protocol):
    """Passes of a head over one text, whose keys and values it keeps."""

    @property
    def bytes(self) -> int:
        """What these take."""

    def compute(
        self, hidden: torch.Tensor, tokens: Sequence[int], first: int, experts: Experts, hits: Hits | None
    ) -> Guessed:
        """A pass over normed states [T, H] at the positions from `first` on, and the token after each, which follow
        what is kept. `experts` and `hits` as of `Program.compute`."""

    def cut(self, length: int) -> None:
        """Keep the first so many positions."""


class ModulePasses:
    """By transformers' modules, which call the hooks of their experts."""

    def __init__(self, head: MtpHead, context: int) -> None:
        self._head, self._allocated = head, Allocated()
        self._cache = head.cache(context, self._allocated)

    @property
    def bytes(self) -> int:
        return self._allocated.bytes

    def compute(
        self, hidden: torch.Tensor, tokens: Sequence[int], first: int, experts: Experts, hits: Hits | None
    ) -> Guessed:
        """As of `HeadPasses`."""
        states = self._head.states(hidden, tokens, first, self._cache)[-1:]
        return Guessed(states, self._head.logits(states))

    def cut(self, length: int) -> None:
        """As of `HeadPasses`."""
        self._cache.cut(length)


class ProgramPasses:
    """By native steps, as the model's own layers are. Angles are those of the positions that it keeps: attention
    depends on their distances alone."""

    def __init__(self, head: MtpHead, trunk: Program, context: int) -> None:
        """Raises ModelError where the head's layer is not known."""
        layer, norm = bind_head(head, context)
        form = replace(trunk.form, layers=(layer,), norm=norm, residual_scale=1.0)
        self._head, self._program = head, Program(form, trunk.kernels)
        like: Any = SimpleNamespace(config=head.own_config)
        self._memory = KVCache(like, context)
        self._kv = self._memory.fresh()

    @property
    def bytes(self) -> int:
        return self._memory.bytes

    def compute(
        self, hidden: torch.Tensor, tokens: Sequence[int], first: int, experts: Experts, hits: Hits | None
    ) -> Guessed:
        """As of `HeadPasses`."""
        batch = Batch("decode", (Share(tokens, self._kv),))
        (logits,) = self._program.compute(batch, 1, experts, hits, self._head.joined(hidden, tokens))
        return Guessed(self._program.normed.clone(), logits)

    def cut(self, length: int) -> None:
        """As of `HeadPasses`."""
        memory = self._memory
        self._kv = memory.cut(self._kv, length) if length and self._kv.whole else memory.fresh()
