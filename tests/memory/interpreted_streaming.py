"""`python -m tests.memory.interpret interpreted_streaming`: a prompt in the fast arithmetic on the emulated GPU, whose
next layer's missing experts are fetched while a layer computes, as {what: how many}.

A prefetch overlaps a layer where its copy waits for nothing that is launched after the layer's router was read: its
stream knows nothing that the compute stream did since then."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from core.memory.ticket import Ticket
from core.memory.transfer import TransferEngine
from core.runtime.moe_step import MoEStep
from tests.checkpoints import make_checkpoint
from tests.loaded import unloading
from tests.memory.interpreted_layer import differing
from tests.memory.interpreted_program import BF16, emulated, load, logits
from tests.tiny_tokenizer import save_tokenizer

LAYERS, EXPERTS = 3, 4
AHEAD = {"eviction": "lru", "scope": "global", "predictor": "all_next", "prefetch_guard": False}
HOW = {"format": "int4-g32", **BF16}


def found(which: str) -> dict[str, int]:
    """Prefetches that were copied, those that overlapped a layer, those of experts that the next router chose, and
    logits that differ from a CPU's."""
    with tempfile.TemporaryDirectory() as folder:
        fields: dict[str, Any] = dict(num_hidden_layers=LAYERS, num_experts=EXPERTS, moe_intermediate_size=32)
        path = save_tokenizer(make_checkpoint("qwen3_moe", Path(folder), num_experts_per_tok=2, **fields))
        with unloading(load(path, "100%", "cpu", HOW)) as engine:
            wanted = logits(engine, [6])
        with emulated(), unloading(load(path, "60%", "cuda", HOW, {**AHEAD, "link": "own"})) as engine:
            with pytest.MonkeyPatch.context() as patch:
                seen = Seen(patch)
                got = logits(engine, [6])
            counts = engine.expert_cache.counts
            return {
                "copied": sum(one.done.is_set() for one, _ in seen.ahead),
                "overlapping": seen.overlapping,
                "used": counts.prefetch_used + counts.prefetch_late,
                "differ": differing(got, wanted),
            }


class Seen:
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.ahead = list[tuple[Ticket, int]]()  # where its layer began
        self._began = 0
        self._stream: Any = torch.cuda.current_stream()
        step, submit = MoEStep.__call__, TransferEngine.submit

        def begun(self_: MoEStep, layer: int, *given: Any) -> torch.Tensor:
            self._began = self._stream.issue()
            return step(self_, layer, *given)

        def submitted(engine: TransferEngine, ticket: Ticket) -> Ticket:
            if not ticket.demand:
                self.ahead.append((ticket, self._began))
            return submit(engine, ticket)

        patch.setattr(MoEStep, "__call__", begun)
        patch.setattr(TransferEngine, "submit", submitted)

    @property
    def overlapping(self) -> int:
        """Whose copies wait for nothing that was launched in the layer after its router was read."""
        copied = [(one, began) for one, began in self.ahead if one.done.is_set() and one.error is None]
        return sum(one.event.clock.get(self._stream.name, 0) <= began for one, began in copied)
