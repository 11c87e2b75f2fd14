"""Questions to substitutes: by hand, and drawn ones that are full of ties."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.metrics.lossy_events import Action, Why
from core.policy.substitute import Ask, Chosen, Gates, Substitute
from core.settings.registry import create

CPU = torch.device("cpu")
LAYERS = 2


@dataclass
class Known:
    pairs: Any = None
    pairs_weighted: Any = None
    likeness: Any = None


def ask(
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    missing: Sequence[int],
    *,
    experts: int,
    under_way: Sequence[int] = (),
    logits: Sequence[Sequence[float]] | None = None,
    named: Sequence[float] | None = None,
) -> Ask:
    """Of layer 1. What is neither missing nor under way is ready."""
    lost, ready = torch.zeros(experts, dtype=torch.bool), torch.ones(experts, dtype=torch.bool)
    lost[list(missing)] = True
    ready[[*missing, *under_way]] = False
    return Ask(
        1,
        torch.tensor(ids),
        torch.tensor(weights),
        lost,
        ready,
        None if logits is None else torch.tensor(logits),
        None if named is None else torch.tensor(named),
    )


def make(name: str, known: Known | None = None, experts: int = 8, **params: Any) -> Substitute:
    made: Substitute = create("substitute", name, params)
    made.prepare(known, LAYERS, experts, CPU)
    return made


def drawn(seed: int, tokens: int, experts: int, k: int) -> tuple[Ask, Known, npt.NDArray[np.float32]]:
    """(a question of layer 1, a profile, scores [T, k, E] with -inf), drawn from few values so that much is equal."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((tokens, experts)), 1)[:, :k]
    if rng.random() < 0.2:
        ids = rng.integers(0, experts, (tokens, k))  # a router that names an expert twice
    weights = (
        rng.choice([0.0, 0.125, 0.25, 0.5, 1.0, 1.5], (tokens, k))
        if rng.random() < 0.5
        else rng.dirichlet(np.ones(k), tokens)
    )
    state = rng.choice(3, experts, p=rng.dirichlet([1.0, 1.0, 0.3]))  # missing, ready, neither
    together = rng.integers(0, 4, (LAYERS, experts, experts)) * (rng.random((LAYERS, experts, experts)) < 0.7)
    scores = rng.choice([-np.inf, 0.0, 0.25, 0.5, 1.0], (tokens, k, experts)).astype(np.float32)
    question = Ask(
        1,
        torch.from_numpy(ids),
        torch.from_numpy(weights.astype(np.float32)),
        torch.from_numpy(state == 0),
        torch.from_numpy(state == 1),
        torch.from_numpy(rng.integers(-3, 4, (tokens, experts)) / 2).float(),
        torch.from_numpy(rng.choice([0.0, 0.25, 1.0], experts)).float(),
    )
    known = Known(
        (together + together.transpose(0, 2, 1)).astype(np.float32),
        rng.random(together.shape, np.float32),
        rng.choice([-1.0, 0.0, 0.5], together.shape).astype(np.float16),
    )
    return question, known, scores


def gates(seed: int, experts: int) -> Gates:
    rng = np.random.default_rng(seed)

    def some(often: float, *values: float) -> float:
        return often if rng.random() < 0.5 else float(rng.choice(values))

    protected = torch.from_numpy(rng.random(experts) < 0.2) if rng.random() < 0.4 else None
    orders = [("substitute",), ("drop",), ("substitute", "drop"), ("drop", "substitute")]
    return Gates(
        tau=some(-1.0, 0.0, 0.5, 0.9, 1.0),
        temperature=some(1.0, 0.8, 1.2),
        margin=some(2.0, 0.0, 0.125, 0.5),
        beta=some(2.0, 0.0, 0.25, 0.5, 1.0),
        rho=int(some(8, 0, 1, 2, 3)),
        rho_order=("lightest", "heaviest")[rng.integers(2)],
        protected=protected,
        order=orders[rng.integers(4)],
        drop_share=some(1.0, 0.0, 0.1, 0.25),
    )


def names(found: Chosen) -> tuple[list[list[int]], list[list[str]], list[list[str]]]:
    return (
        found.ids.tolist(),
        [[Action(a).name for a in row] for row in found.action.tolist()],
        [[Why(w).name for w in row] for row in found.why.tolist()],
    )
