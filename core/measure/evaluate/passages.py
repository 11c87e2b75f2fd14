"""The exact model's log-probabilities of a text, and what a mode makes of it beside them."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from core.engine import Engine
from core.engine.passages import STRETCH
from core.engine.texts import Text, from_path
from core.errors import MoestroError, SettingError
from core.measure.evaluate.follow import follow
from core.memory.store import Cancelled
from core.types import StepRecord


def read(path: Path) -> list[Text]:
    """Reads a text file of the user's, or a folder of them. Raises SettingError."""
    try:
        return from_path(path)
    except MoestroError as error:
        raise SettingError(str(error)) from error


@torch.inference_mode()
def reference(engine: Engine, pieces: Sequence[Sequence[int]], cancel: threading.Event) -> list[torch.Tensor]:
    """The exact model's log-probabilities [n, V] float32 of each piece, on the host: 4 V bytes per token. It decodes
    token by token, like the modes compared with it. Raises BusyError, Cancelled."""
    found = []
    with engine.workbench("The model is being evaluated.") as bench, bench.unpaced():
        for ids in pieces:
            cache, rows = bench.kv.fresh(), []
            for at, token in enumerate(ids[:-1]):
                if cancel.is_set():
                    raise Cancelled
                rows.append(bench.run([token], cache, "decode" if at else "prefill")[-1].float().log_softmax(-1).cpu())
            found.append(torch.stack(rows))
    return found


@dataclass(slots=True)
class Heard:
    """A text read in a mode, against the exact model. Sums over `tokens` positions."""

    tokens: int = 0
    nll: float = 0.0  # nats
    nll_squares: float = 0.0
    agreed: int = 0  # positions with the exact model's likeliest token
    kls: list[float] = field(default_factory=list)  # of each position: nats, from the exact distribution to this one
    copied: list[float] = field(default_factory=list)  # of each decode pass: bytes, on demand and ahead

    @property
    def kl(self) -> float:
        return sum(self.kls)

    def blocks(self) -> dict[str, list[float]]:
        """Means over consecutive stretches of STRETCH positions: what two modes are compared by."""
        return {
            name: [sum(one[at : at + STRETCH]) / STRETCH for at in range(0, len(one) - STRETCH + 1, STRETCH)]
            for name, one in (("kl", self.kls), ("link_bytes", self.copied))
        }

    def add(self, target: int, logits: torch.Tensor, exact: torch.Tensor) -> None:
        """Adds one position: logits [V], and the exact model's log-probabilities [V]."""
        mine = logits.float().log_softmax(-1).cpu()
        nll = -float(mine[target])
        self.tokens += 1
        self.nll += nll
        self.nll_squares += nll * nll
        self.agreed += int(mine.argmax()) == int(exact.argmax())
        p = exact.exp()
        self.kls.append(float(torch.where(p > 0, p * (exact - mine), 0.0).sum()))


def listen(
    engine: Engine,
    pieces: Sequence[Sequence[int]],
    exact: Sequence[torch.Tensor],
    cancel: threading.Event,
    passed: Callable[[StepRecord], None],
    progress: Callable[[int], None],
) -> Heard:
    """Reads the pieces with the settings in force; `progress` is called with the positions so far."""
    heard = Heard()

    def stepped(step: StepRecord) -> None:
        passed(step)
        if step.phase == "decode":
            heard.copied.append(float(step.demand_bytes + step.prefetch_bytes))

    for ids, rows in zip(pieces, exact, strict=True):
        for at, logits in follow(engine, ids, 1, cancel, stepped):
            heard.add(ids[at], logits, rows[at - 1])
            progress(heard.tokens)
    return heard
