"""What a substitute is: for a selected expert that is missing it says how good each other one would be in its place.

Source: BuddyMoE sections 3.1 to 3.3 and Algorithm 1; METHODS sections 1 and 6. Which of them is taken, and whether any
may be, is decided in `plain` (one token) and `batch` (many) alike, whatever the substitute.

T tokens of one MoE layer with E experts, k selected. A token's experts are looked at in the order the router gave them.
An expert is missing (not on the device, and no copy of it under way), ready (it can be computed at once), or neither: a
copy of it is under way. The last kind is waited for as ever, and is nobody's substitute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from core.errors import SettingError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EVEN = 1e-9  # closer to a threshold than this counts as on it, so that the order of a sum decides nothing
OPTIONS = ("substitute", "drop")


class Facts(Protocol):
    """What substitutes read of a profile (core.profile.Profile); None where it was not gathered."""

    @property
    def pairs(self) -> npt.NDArray[np.floating] | None:
        """[L, E, E] tokens that chose both experts, diagonal 0 ..."""

    @property
    def pairs_weighted(self) -> npt.NDArray[np.floating] | None:
        """[L, E, E] ... and the sum of the smaller of their two renormalised weights."""

    @property
    def likeness(self) -> npt.NDArray[np.floating] | None:
        """[L, E, E] mean cosine of the two experts' outputs on the same inputs."""


@dataclass(slots=True)
class Ask:
    """One MoE layer of one pass, after its router. All tensors are on one device."""

    layer: int
    ids: Tensor  # int64 [T, k] what the router selected
    weights: Tensor  # fp32 [T, k] with its weights, not negative; they need not add up to 1
    missing: Tensor  # bool [E]
    ready: Tensor  # bool [E], apart from `missing`
    logits: Tensor | None = None  # fp32 [T, E] of the router, for substitutes with `logits`
    named: Tensor | None = None  # fp32 [E] what the predictor gave each, 0 = not named; for those with `named`
    weigh: Callable[[Tensor], Tensor] | None = None  # the router's own weights [T, k] for any ids [T, k]

    def check(self, experts: int) -> None:
        """Raises SettingError when it is not about a layer of so many experts."""
        for name, mask in (("missing", self.missing), ("ready", self.ready)):
            if mask.shape != (experts,):
                raise SettingError(
                    f"The mask of {name} experts has the shape {tuple(mask.shape)}, but a layer of this "
                    f"model has {experts} experts. Give one flag for each."
                )


@dataclass(frozen=True)
class Gates:
    """When something may be done in place of waiting, and what. As it comes nothing but `rho` holds anything back.

    `order` = what is tried for each missing expert: the first that may be done is done.
    """

    tau: float = -1.0  # none for a token whose TAE <= tau
    temperature: float = 1.0  # of the softmax over the token's selected experts that TAE is the entropy of
    margin: float = 2.0  # none for a token whose first weight is so far above its second, renormalised
    beta: float = 2.0  # none at all when delta >= beta
    rho: int = 3  # most changes of one token in one layer
    unique: bool = True  # no expert twice for one token ...
    discount: float = 1.0  # ... or, when not unique: times the score of one that the token has
    protected: Tensor | None = None  # bool [E] experts of this layer that are never replaced or dropped
    order: tuple[str, ...] = ("substitute",)
    drop_share: float = 1.0  # drop an expert only if at most this share of the token's weight is its own

    def __post_init__(self) -> None:
        if not set(self.order) <= set(OPTIONS):
            raise ValueError(f"order {self.order} may name {OPTIONS}")

    @cached_property
    def shielded(self) -> frozenset[int]:
        """`protected` as ids."""
        return frozenset() if self.protected is None else frozenset(self.protected.nonzero().flatten().tolist())


class Chosen(NamedTuple):
    """What is computed, and why. Tensors are on the device of the question."""

    ids: Tensor  # int64 [T, k]; -1 = dropped
    action: Tensor  # uint8 [T, k] core.types.Action
    why: Tensor  # uint8 [T, k] core.types.Why: of what waits, why the last option failed
    delta: float  # share of the distinct selected experts that are missing
    tae: Tensor  # fp32 [T] at the gate's temperature; 0 when only one expert is selected
    weights: Tensor | None = None  # fp32 [T, k] in place of the router's; None = those, position by position


class Candidates(Protocol):
    """What is chosen from. `listed` and `column` say the same, for one expert and for a whole column of them.

    The best score wins; among equal scores the one that stands first. A candidate that is not ready is passed over, and
    so is the missing expert itself, if it is named.
    """

    reroutes: ClassVar[bool] = False  # True: the whole choice is its own: `reroute`

    @property
    def experts(self) -> int:
        """E of the layers it knows."""

    def reroute(self, ask: Ask, gates: Gates) -> Chosen:
        """The whole choice, for one that `reroutes`."""
        raise TypeError(f"{type(self).__name__} has candidates, but no choice of its own.")

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        """(expert, score) of every candidate for `expert`, which is ids[token, position]. Scores that may be
        discounted are at least 0; -inf = none."""

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        """Candidates for ids[:, position]: (experts int64 [T, R], scores [T, R]), -inf = none. No experts: all of them
        by id, R = E."""


class Substitute(Candidates, Protocol):
    """A registered variant of kind "substitute". Built from its parameters, then prepared for a model."""

    needs: ClassVar[tuple[str, ...]] = ()  # parts of the profile (core.profile.PARTS) that it cannot do without
    logits: bool = False  # True: it has to be given the router's logits
    named: bool = False  # True: it has to be given what the predictor named
    unique: bool = True  # what it wants of the gates
    discount: float = 1.0
    bytes: int = 0  # of its tables on the device
    experts: int = 0  # E, once prepared

    def prepare(self, profile: Facts | None, layers: int, experts: int, device: torch.device) -> None:
        """Take what is known of a model. Raises ProfileError or SettingError, saying what to do."""

    def scores(self, ask: Ask) -> Tensor:
        """[T, k, E] how good each expert would be in the place of each selected one, -inf where never. `select` does
        not need it: it looks at one column at a time."""
        import torch

        columns = []
        for position in range(ask.ids.shape[1]):
            experts, found = self.column(ask, position)
            if experts is not None:
                found = found.new_full((len(found), len(ask.ready)), -torch.inf).scatter_reduce_(
                    1, experts, found, "amax"
                )
            columns.append(found)
        return torch.stack(columns, 1)

    def matrix(self, layer: int) -> Tensor | None:
        """[E, E] how good j is in the place of i, 0 = never, where that is the same for all tokens."""
        return None


@dataclass(frozen=True, slots=True)
class Given(Candidates):
    """Candidates by scores that are there: [T, k, E]."""

    values: Tensor

    @property
    def experts(self) -> int:
        return int(self.values.shape[-1])

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        found: list[float] = self.values[token, position].tolist()
        return enumerate(found)

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        return None, self.values[:, position]


def source_of(ask: Ask, scores: Candidates | Tensor | None) -> Candidates | None:
    """Who is asked for candidates. Raises SettingError when the question is about another number of experts."""
    source = Given(cast("Tensor", scores)) if hasattr(scores, "new_empty") else scores
    ask.check(len(ask.ready) if source is None else source.experts)
    return source
