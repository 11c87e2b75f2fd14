"""A decoded token as one CUDA graph: launched by one call, over memory that stays where it is.

The token, its position, keys and values, and the table of experts are where they were when the graph was captured; what
they hold may change. The shapes of a graph are fixed: attention is launched for as many positions as the next power of
two, so that there are few graphs. Our own (core.hf.decode_attention) reads on the device how many of them are filled;
torch's is given a mask that leaves the others out.

What the host knows of a sequence (its length) would be captured as a number, and be wrong one token later. So a pass
that asks for it is not captured, and a graph is used only once it has agreed with an ordinary pass, for the token after
the one that it was captured with.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from core.errors import ModelError
from core.hf.cached_pass import cached_pass
from core.hf.reserved_layers import Fixed, Held
from core.runtime.batch import Share
from core.runtime.graph_pool import GraphPool
from core.runtime.out_of_memory import shortage
from core.runtime.sequence_kv import SequenceKV
from core.system.text_config import text_config

SHORTEST = 256  # positions of the shortest graph
CLOSE = 0.03  # relative difference of logits, of their norm: far above rounding, far below any mistake
TRIES = 3  # as a router's near tie may go the other way in one token
MASKS = ("sdpa", "eager")  # implementations of attention whose masks these are


ProgramPass = Callable[[SequenceKV, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""(KV, token [1], position [1], positions at most) -> logits [1, V]: the numbers are on the device."""


class Captured(NamedTuple):
    """A graph, and where it leaves its logits [1, V]."""

    graph: Any
    logits: torch.Tensor


class TokenGraphs:
    """For the answers of one model, on the compute thread. `say` gets the reason, once, why nothing can be captured."""

    def __init__(
        self,
        model: Any,
        device: torch.device,
        context: int,
        fits: Callable[[], bool],
        program: ProgramPass | None = None,
    ) -> None:
        """`fits`: whether the budget holds what is reserved now. `program`: computes in the fast arithmetic, in which a
        graph has to have the very bits of an ordinary pass; None = transformers' modules."""
        self._model, self._device, self._context, self._fits = model, device, context, fits
        self._program = program
        self.say: Callable[[str], None] = lambda reason: None
        self.broke_off: Callable[[], None] = lambda: None  # after a pass of which nothing may be kept
        self.reason = ""  # why passes are not captured
        self.replays = 0
        self._failed = 0
        self._graphs: dict[int, Captured] = {}  # by length
        self._tried: set[int] = set()  # ... of which the pass captured agreed with an ordinary one
        self._agreed: set[int] = set()  # ... and a replay for the next token as well
        self._held: tuple[Held, ...] = ()  # the memory that they are captured over
        self._pool = GraphPool(device)
        with torch.inference_mode(False):
            self._inputs_on_host = torch.zeros(2, dtype=torch.int64).pin_memory()
            self._inputs = torch.zeros(2, dtype=torch.int64, device=device)
        self._token, self._position = self._inputs[:1].view(1, 1), self._inputs[1:]

    @torch.inference_mode()
    def compute(self, share: Share, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The logits [1, V] after a share's one token. `launch` makes the ordinary pass, and the KV grow with it."""
        kv = share.kv
        assert kv is not None and len(share.tokens) == 1
        if self.reason or not 0 < kv.length < self._context:  # the first token of a text may find no memory yet
            return launch()
        if (held := kv.memory.held()) != self._held or self._pool.failed:  # one that was broken off
            self._forget()
            self._held = held
        length, (token,) = self._length(kv.length + 1), share.tokens
        self._send(token, kv.length)
        if length in self._agreed:
            kv.whole = False
            logits = self._replayed(length)
            self.took(kv)
            kv.whole = True
            return logits
        got = self._replayed(length) if length in self._graphs else self._capture(kv, length)
        logits = launch()  # afterwards, so that the KV has what the ordinary pass wrote
        if got is not None and not (_close(got, logits) if self._program is None else torch.equal(got, logits)):
            self._differed(length)
        elif got is not None and length in self._tried:
            self._agreed.add(length)
        elif got is not None:
            self._tried.add(length)
        return logits

    def usable(self, share: Share) -> bool:
        """Whether a share's one token is a graph that has agreed."""
        kv = share.kv
        if kv is None or self.reason or self._pool.failed or kv.length >= self._context:
            return False
        return self._length(kv.length + 1) in self._agreed and kv.memory.held() == self._held

    @torch.inference_mode()
    def replayed(self, share: Share) -> torch.Tensor:
        """Launch it -> its logits [1, V]. The KV does not know of it until `took`."""
        kv, (token,) = share.kv, share.tokens
        assert kv is not None
        self._send(token, kv.length)
        return self._replayed(self._length(kv.length + 1))

    def took(self, kv: SequenceKV) -> None:
        """The KV has the token that a graph has computed."""
        kv.memory.grow(kv, 1)
        self.replays += 1

    def close(self) -> None:
        """Give back the graphs and their memory."""
        self._forget()

    def _length(self, positions: int) -> int:
        return min(self._context, max(SHORTEST, 1 << (positions - 1).bit_length()))

    def _send(self, token: int, position: int) -> None:
        """To the device, in the computing stream. The host has waited for what read these before."""
        self._inputs_on_host[0], self._inputs_on_host[1] = token, position
        self._inputs.copy_(self._inputs_on_host, non_blocking=True)

    def _replayed(self, length: int) -> torch.Tensor:
        self._graphs[length].graph.replay()
        return self._graphs[length].logits.clone()

    def _capture(self, kv: SequenceKV, length: int) -> torch.Tensor | None:
        """Capture a pass over the token in `_inputs` -> the logits [1, V] of that pass, made once before; None where it
        cannot be captured."""
        reason = self._objection(kv)
        try:
            if not reason:
                with kv.memory.fixed(Fixed(self._position, length)):
                    got = self._pass(kv, length).clone()  # also allocates and compiles what no graph may
                    reason = self._pool.lack()
                    if not reason:
                        self._graphs[length] = Captured(*self._pool.capture(lambda: self._pass(kv, length)))
        except ModelError as error:
            reason = f"its pass cannot be captured: {error}"
        except RuntimeError as error:
            reason = _uncaptured(error.__context__ or error)  # ending a capture fails after its error
        if not reason and self._fits():
            return got
        self.broke_off()
        self._give_up(reason or "a graph needs more memory than the budget leaves")  # the error is gone by now
        return None

    def _objection(self, kv: SequenceKV) -> str:
        if not kv.memory.fixable():
            return "its layers keep more, or less, than the keys and values of the whole context"
        if self._program is not None:
            return ""
        attention = str(getattr(text_config(self._model.config), "_attn_implementation", ""))
        return "" if attention in MASKS else f"attention computed as {attention!r} takes other masks"

    def _pass(self, kv: SequenceKV, length: int) -> torch.Tensor:
        """The model's pass over the token and position in `_inputs`, without numbers that the host knows -> [1, V]."""
        if self._program is not None:
            return self._program(kv, self._inputs[:1], self._position, length)
        mask = (torch.arange(length, device=self._device) <= self._position).view(1, 1, 1, length)
        if text_config(self._model.config)._attn_implementation == "eager":  # which adds it
            dtype = self._model.dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=self._device).masked_fill(~mask, torch.finfo(dtype).min)
        found: torch.Tensor = cached_pass(
            self._model,
            self._token,
            kv.cache,
            position_ids=self._position.view(1, 1),
            attention_mask=mask,
            logits_to_keep=1,
        ).logits[0]
        return found

    def _differed(self, length: int) -> None:
        self._graphs.pop(length, None)
        self._tried.discard(length)
        self._failed += 1
        if self._failed == TRIES:
            by = f" by more than {CLOSE:.0%}" if self._program is None else ""
            self._give_up(f"it differed from an ordinary pass{by} in {TRIES} trials")

    def _give_up(self, reason: str) -> None:
        self._forget()
        self.reason = reason
        self.say(reason)

    def _forget(self) -> None:
        self._graphs.clear()
        self._tried.clear()
        self._agreed.clear()
        self._held = ()
        self._pool.give_back()


def _uncaptured(error: BaseException) -> str:
    if lack := shortage(error):
        return f"a graph has no room for {lack}"
    return f"its pass cannot be captured ({str(error).strip().partition(chr(10))[0]})"


def _close(got: torch.Tensor, want: torch.Tensor) -> bool:
    got, want = got.float(), want.float()
    return bool((got - want).norm() <= CLOSE * want.norm())  # not where it is not a number
