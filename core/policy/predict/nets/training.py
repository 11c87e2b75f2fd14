"""Shared training code of the small networks: seed, schedule, progress and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

Progress = Callable[[str, float], None]
"""(what is being done, share of it in [0, 1])"""


def descend(
    net: nn.Module,
    steps: int,
    loss_of: Callable[[int], torch.Tensor],
    what: str,
    *,
    rate: float,
    decay: float,
    progress: Progress,
    cancel: threading.Event | None,
) -> float | None:
    """Adam with weight decay and a cosine schedule to 0 over `steps`; `loss_of(step)` computes a batch's loss. Call it
    within `seeded`.

    Returns the mean loss of the last tenth, or None when cancelled. Leaves the net in eval mode, without gradients.
    """
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps))
    last: list[float] = []
    net.train()
    for step in range(steps):
        if cancel is not None and cancel.is_set():
            return None
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step >= steps - max(1, steps // 10):
            last.append(float(loss.detach()))
        if step % 10 == 0 or step + 1 == steps:
            progress(what, (step + 1) / steps)
    net.eval().requires_grad_(False)
    return sum(last) / max(1, len(last))


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """A separate generator for the data; inside, new modules are initialised from the same seed and can be trained,
    even when called in inference mode. Restores the process's random state afterwards."""
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


def batches(rows: int, batch: int, epochs: int, generator: torch.Generator) -> Callable[[int], torch.Tensor]:
    """Step -> the rows [<= batch] of its batch; every epoch uses every row once, in a new order. Call with steps in
    order."""
    each = -(-rows // batch)
    order = torch.zeros(0, dtype=torch.long)

    def pick(step: int) -> torch.Tensor:
        nonlocal order
        at = step % each
        if at == 0:
            order = torch.randperm(rows, generator=generator)
        return order[at * batch : (at + 1) * batch]

    return pick


def packed(prefix: str, net: nn.Module) -> dict[str, torch.Tensor]:
    """The net's weights under `prefix.`, on the CPU."""
    return {f"{prefix}.{name}": tensor.detach().cpu() for name, tensor in net.state_dict().items()}


def unpacked(prefix: str, net: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the weights that `packed` returned. Raises RuntimeError when one is missing or has another size."""
    start = f"{prefix}."
    net.load_state_dict({n.removeprefix(start): t for n, t in tensors.items() if n.startswith(start)})
    net.eval().requires_grad_(False)
