"""The substitute interface: scores for all other experts as a replacement of a selected expert that is missing.

Source: BuddyMoE sections 3.1 to 3.3 and Algorithm 1. Which candidate is taken, and whether any may be, is decided
identically in `plain` (one token) and `batch` (many), whatever the substitute.

T tokens of one MoE layer with E experts, k selected. A token's experts are processed in the router's order: who comes
first claims a candidate first. Algorithm 1 knows no rho. Where it would change more of a token's experts than rho,
those of least weight are changed (`Gates.rho_order`), and they claim their candidates anew, in the router's order. An
expert is missing (not on the device, and not being copied), ready (it can be computed at once), or neither: it is being
copied. The last kind is always waited for, and is never a candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from core.errors import SettingError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

EVEN = 1e-9  # closer to a threshold than this counts as on it, so that summation order has no effect
OPTIONS = ("substitute", "drop")


class SubstituteProfile(Protocol):
    """The parts of a profile (core.profile.Profile) that substitutes read; None where not measured."""

    @property
    def pairs(self) -> npt.NDArray[np.floating] | None:
        """[L, E, E] number of tokens that chose both experts, diagonal 0."""

    @property
    def pairs_weighted(self) -> npt.NDArray[np.floating] | None:
        """[L, E, E] as `pairs`, but the sum of the smaller of their two renormalised weights."""

    @property
    def likeness(self) -> npt.NDArray[np.floating] | None:
        """[L, E, E] mean cosine of the two experts' outputs on the same inputs."""


@dataclass(slots=True)
class Ask:
    """The inputs of a choice: one MoE layer of one pass, after its router. All tensors are on one device."""

    layer: int
    ids: Tensor  # int64 [T, k] the router's selection
    weights: Tensor  # fp32 [T, k] its weights, not negative; they need not add up to 1
    missing: Tensor  # bool [E]
    ready: Tensor  # bool [E], disjoint from `missing`
    logits: Tensor | None = None  # fp32 [T, E] of the router, for substitutes with `logits`
    named: Tensor | None = None  # fp32 [E] the predictor's score of each, 0 = not predicted; for those with `named`
    weigh: Callable[[Tensor], Tensor] | None = None  # the router's weights [T, k] for any ids [T, k]
    _read: dict[tuple[int, int], tuple[Tensor, list[float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def numbers(self, what: Literal["weights", "logits", "named"], token: int = 0) -> list[float]:
        """A token's row of one of these, which must be there, on the host: read from the device once."""
        values: Tensor = getattr(self, what)
        if (id(values), token) not in self._read:  # which keeps the tensor, so that no other has its id
            self._read[id(values), token] = values, (values if values.dim() == 1 else values[token]).tolist()
        return self._read[id(values), token][1]

    def check(self, experts: int) -> None:
        """Raises SettingError when the masks are not for a layer with `experts` experts."""
        for name, mask in (("missing", self.missing), ("ready", self.ready)):
            if mask.shape != (experts,):
                raise SettingError(
                    f"The mask of {name} experts has the shape {tuple(mask.shape)}, but a layer of this "
                    f"model has {experts} experts. Give one flag for each."
                )


@dataclass(frozen=True)
class Gates:
    """Conditions for acting instead of waiting, and the actions. By default only `rho` limits anything.

    `order` = the actions tried for each missing expert: the first that is allowed is taken."""

    tau: float = -1.0  # no change for a token whose TAE <= tau
    temperature: float = 1.0  # of the softmax over the token's selected experts whose entropy is TAE
    margin: float = 2.0  # no change for a token whose two largest weights differ by at least this, renormalised
    beta: float = 2.0  # no change at all when delta >= beta
    rho: int = 3  # most changes of one token in one layer
    rho_order: Literal["lightest", "heaviest"] = "lightest"  # whom they are spent on where more could be changed
    protected: Tensor | None = None  # bool [E] experts of this layer that are never replaced or dropped
    order: tuple[str, ...] = ("substitute",)
    drop_share: float = 1.0  # drop an expert only if it has at most this share of the token's weight

    def __post_init__(self) -> None:
        if not set(self.order) <= set(OPTIONS):
            raise ValueError(f"order {self.order} may name {OPTIONS}")

    @cached_property
    def shielded(self) -> frozenset[int]:
        """`protected` as ids."""
        return frozenset() if self.protected is None else frozenset(self.protected.nonzero().flatten().tolist())


class Chosen(NamedTuple):
    """The resulting choice, with reasons. Tensors are on the device of the `Ask`."""

    ids: Tensor  # int64 [T, k]; -1 = dropped
    action: Tensor  # uint8 [T, k] core.types.Action
    why: Tensor  # uint8 [T, k] core.types.Why: for waits, why the last option failed
    delta: float  # share of the distinct selected experts that are missing
    tae: Tensor  # fp32 [T] at the gate's temperature; 0 when only one expert is selected
    weights: Tensor | None = None  # fp32 [T, k] in place of the router's; None = those, position by position


class Candidates(Protocol):
    """A source of candidates. `listed` and `column` give the same scores, for one expert and for a whole column.

    The highest score wins; ties go to the first candidate. Candidates that are not ready are skipped, and so is the
    missing expert itself, if it is among them."""

    reroutes: ClassVar[bool] = False  # True: it makes the whole choice itself, in `reroute`

    @property
    def experts(self) -> int:
        """E of the layers it was prepared for."""

    def reroute(self, ask: Ask, gates: Gates) -> Chosen:
        """The whole choice, if `reroutes`."""
        raise TypeError(f"{type(self).__name__} has candidates, but no choice of its own.")

    def listed(self, ask: Ask, token: int, position: int, expert: int) -> Iterable[tuple[int, float]]:
        """(expert, score) of every candidate for `expert`, which is ids[token, position]; -inf = none."""

    def column(self, ask: Ask, position: int) -> tuple[Tensor | None, Tensor]:
        """Candidates for ids[:, position]: (experts int64 [T, R], scores [T, R]), -inf = none. Experts None: all of
        them by id, R = E."""


class Substitute(Candidates, Protocol):
    """A registered variant of kind "substitute". Built from its parameters, then prepared for a model."""

    needs: ClassVar[tuple[str, ...]] = ()  # parts of the profile (core.profile.PARTS) that it requires
    together: ClassVar[bool] = False  # True: it knows an expert by those that a token chooses with it
    logits: bool = False  # True: it needs the router's logits
    named: bool = False  # True: it needs the predictor's scores
    bytes: int = 0  # of its tables on the device
    experts: int = 0  # E, once prepared

    def prepare(self, profile: SubstituteProfile | None, layers: int, experts: int, device: torch.device) -> None:
        """Prepare for a model. Raises ProfileError or SettingError, with advice."""

    def scores(self, ask: Ask) -> Tensor:
        """[T, k, E] score of each expert as a replacement of each selected one, -inf where never. `select` does not
        need it: it processes one column at a time."""
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
        """[E, E] score of j as a replacement of i, 0 = never, if it is the same for all tokens."""
        return None


@dataclass(frozen=True, slots=True)
class Given(Candidates):
    """Candidates from existing scores [T, k, E]."""

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
    """The source of candidates. Raises SettingError when `ask` is for another number of experts."""
    source = Given(cast("Tensor", scores)) if hasattr(scores, "new_empty") else scores
    ask.check(len(ask.ready) if source is None else source.experts)
    return source
