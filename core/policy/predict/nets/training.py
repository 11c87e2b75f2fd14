"""Shared training code of the small networks: seed, schedule, progress, cancellation, and going on after a stop."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

DECAY = 0.01  # of weights, a step
SAVED = 200  # steps between two saved states of a training that can go on
NEAR = 32  # batches whose rows are divided among them by length

Progress = Callable[[str, float], None]
"""(what is being done, share of it in [0, 1])"""


class TrainingState(Protocol):
    """Where a training's tensors stay, so that it can go on in another process."""

    def read(self) -> Mapping[str, torch.Tensor] | None:
        """What was written last; None = nothing was."""

    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep these in place of those before, which stay until these are complete."""

    def drop(self) -> None:
        """The training is complete."""


def descend(
    net: nn.Module,
    steps: int,
    loss_of: Callable[[int], torch.Tensor],
    what: str,
    *,
    rate: float,
    progress: Progress,
    cancel: threading.Event | None,
    state: TrainingState | None = None,
) -> float | None:
    """Adam with weight decay apart from its moments (AdamW) and a cosine schedule to 0 over `steps`; `loss_of(step)`
    computes a batch's loss. Within the moments, decay would outweigh the small gradients of rare tokens, and move an
    embedding that a batch lacks by as much as one that it has. Call it within `seeded`. `state` keeps the weights and
    the optimizer's moments of every SAVED steps, and of the step that a cancel came after, so that a later call with
    the same arguments continues there; dropped at the end.

    Returns the mean loss of the last tenth, or None when cancelled. Leaves the net in eval mode, without gradients."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=DECAY)
    kept = None if state is None else state.read()
    first = 0 if kept is None else _restored(kept, net, optimizer)
    last: list[float] = []
    net.train()
    for step in range(first, steps):
        stops = cancel is not None and cancel.is_set()
        if state is not None and step > first and (stops or step % SAVED == 0):
            state.write(_held(net, optimizer, step))
        if stops:
            return None
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step >= steps - max(1, steps // 10):
            last.append(float(loss.detach()))
        if step % 10 == 0 or step + 1 == steps:
            progress(what, (step + 1) / steps)
    net.eval().requires_grad_(False)
    if state is not None:
        state.drop()
    return sum(last) / max(1, len(last))


def _held(net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, torch.Tensor]:
    """A training's state after `step` steps."""
    moments = {
        f"adam.{at}.{name}": tensor
        for at, one in optimizer.state_dict()["state"].items()
        for name, tensor in one.items()
    }
    return {**packed("net", net), **moments, "step": torch.tensor(step)}


def _restored(tensors: Mapping[str, torch.Tensor], net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put back what `_held` gave; the steps that are done. Raises RuntimeError for a net of another size."""
    unpacked("net", net, tensors)
    net.requires_grad_(True)
    known = optimizer.state_dict()
    for name, tensor in tensors.items():
        if name.startswith("adam."):
            _, at, moment = name.split(".")
            known["state"].setdefault(int(at), {})[moment] = tensor
    optimizer.load_state_dict(known)
    return int(tensors["step"])


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """A separate generator for the data; inside, new modules are initialised from the same seed and can be trained,
    even when called in inference mode. Restores the process's random state afterwards."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


def batches(
    rows: int, batch: int, generator: torch.Generator, lengths: Sequence[int] = ()
) -> Callable[[int], torch.Tensor]:
    """Step -> the rows [<= batch] of its batch; every epoch uses every row once, in a new order. Call with ascending
    steps; some may be left out. With the `lengths` of all rows, those of a batch are about as long as each other: of
    NEAR batches at a time, rows are divided by length, and the batches come in any order."""
    each = -(-rows // batch)
    order, drawn = list[torch.Tensor](), 0
    length = torch.tensor(lengths, dtype=torch.long)

    def epoch_order() -> list[torch.Tensor]:
        order = torch.randperm(rows, generator=generator)
        if not len(length):
            return list(order.split(batch))
        parts = order.split(NEAR * batch)
        found = [one for part in parts for one in part[length[part].argsort(stable=True)].split(batch)]
        return [found[at] for at in torch.randperm(len(found), generator=generator).tolist()]

    def pick(step: int) -> torch.Tensor:
        nonlocal order, drawn
        epoch, at = divmod(step, each)
        while drawn <= epoch:
            order, drawn = epoch_order(), drawn + 1
        return order[at]

    return pick


def packed(prefix: str, net: nn.Module) -> dict[str, torch.Tensor]:
    """The net's weights under `prefix.`, on the CPU."""
    return {f"{prefix}.{name}": tensor.detach().cpu() for name, tensor in net.state_dict().items()}


def unpacked(prefix: str, net: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the weights that `packed` returned. Raises RuntimeError when one is missing or has another size."""
    start = f"{prefix}."
    net.load_state_dict({n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)})
    net.eval().requires_grad_(False)
