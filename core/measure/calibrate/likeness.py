"""Likeness of the experts of a layer: the cosine of two experts' outputs for the same input (BuddyMoE figure 4)."""

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from core.memory.store import Cancelled
from core.runtime.measurement import LayerRun, MeasurementSession

SEED = 0
TOKENS = 256  # inputs of each layer that all its experts compute ...
OUTPUTS_BYTES = 256 << 20  # ... fewer if their outputs would take more than this


class Likeness:
    """Keeps a uniform sample of expert inputs while texts are read; `measure` then runs every expert of a layer on all
    of that layer's sample.

    Host memory, N tokens of width H: L * N * H numbers of the model's dtype, and the outputs of one layer's E experts,
    2 * E * N * H bytes. Device memory: that of a pass, and 8 * T * k * H bytes for chunks of T tokens."""

    def __init__(self, layers: int, experts: int, hidden: int) -> None:
        self._draw = Draw(max(8, min(TOKENS, OUTPUTS_BYTES // (2 * experts * hidden))))
        self._given: torch.Tensor | None = None  # [L, N, H]
        self._shape = layers, hidden

    def begin(self, tokens: int) -> None:
        """A pass over `tokens` tokens follows."""
        self._draw.begin(tokens)

    def add(self, run: LayerRun) -> None:
        """Adds the next layer of that pass."""
        if self._given is None:
            layers, hidden = self._shape
            self._given = torch.zeros(layers, self._draw.capacity, hidden, dtype=run.given.dtype)
        if len(self._draw.slots):
            kept = run.given[self._draw.rows.to(run.given.device)]
            self._given[run.seen.layer, torch.from_numpy(self._draw.slots)] = kept.cpu()

    def measure(
        self, bench: MeasurementSession, progress: Callable[[str, float], None], cancel: threading.Event
    ) -> npt.NDArray[np.float16] | None:
        """[L, E, E] mean over the sample of the cosine of two experts' outputs; diagonal 1. An output of length 0 has
        cosine 0 with all others. None when nothing was read. Raises Cancelled."""
        if self._given is None or not self._draw.count:
            return None
        layers, experts = bench.shape.layers, bench.shape.experts
        found = np.empty((layers, experts, experts), np.float16)
        for layer, row in enumerate(found):
            given = self._given[layer, : min(self._draw.count, bench.chunk * bench.shape.top_k)]
            if len(given) == 1:
                given = given.expand(2, -1)  # experts are computed together from two tokens on
            outs = torch.empty(experts, len(given), given.shape[1], dtype=torch.float16)
            at_once = max(1, bench.chunk * bench.shape.top_k // len(given))
            for first in range(0, experts, at_once):
                if cancel.is_set():
                    raise Cancelled
                some = range(first, min(experts, first + at_once))
                progress("Measuring how alike experts are", (layer + first / experts) / layers)
                made = bench.outputs(layer, given.to(bench.device), some).float()
                outs[first : first + len(some)] = torch.nn.functional.normalize(made, dim=-1).transpose(0, 1).cpu()
            row[:] = _products(outs, bench.device, at_once).numpy()
        return found


def _products(outs: torch.Tensor, device: torch.device, at_once: int) -> torch.Tensor:
    """[E, E] mean over tokens of the dot products of unit vectors [E, N, H]; `at_once` numbers at a time
    on the device."""
    experts, tokens, _ = outs.shape
    whole = torch.zeros(experts, experts, device=device)
    step = max(1, at_once * tokens // experts)
    for first in range(0, tokens, step):
        part = outs[:, first : first + step].to(device).float().flatten(1)
        whole += part @ part.T
    return (whole / tokens).clamp(-1.0, 1.0).fill_diagonal_(1.0).cpu()


class Draw:
    """A uniform sample of `capacity` tokens; which tokens of a pass are in it is decided before the pass
    (algorithm R)."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self._seen = capacity, 0
        self._random = np.random.default_rng(SEED)
        self.rows, self.slots = torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64)

    def begin(self, tokens: int) -> None:
        """A pass over `tokens` tokens follows: those at `rows` go to positions `slots` of the sample."""
        slots: dict[int, int] = {}
        for row, number in enumerate(range(self._seen, self._seen + tokens)):
            slot = number if number < self.capacity else int(self._random.integers(number + 1))
            if slot < self.capacity:
                slots[slot] = row
        self._seen += tokens
        self.rows, self.slots = torch.tensor(list(slots.values()), dtype=torch.int64), np.array(list(slots), np.int64)

    @property
    def count(self) -> int:
        """Tokens in the sample."""
        return min(self._seen, self.capacity)
