"""What a predictor is: it looks at the layer that is about to be computed and names experts of later layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from core.policy.predict.aside import AsyncWorker, Task

Floats = npt.NDArray[np.floating]
Net = tuple[Mapping[str, int], Mapping[str, npt.NDArray[Any]]]  # a network's configuration and its weights
State = Literal["hidden", "default"]


@dataclass(frozen=True, slots=True)
class Later:
    """Numbers that the device may still be working out: calling it waits for them, and `ready` tells whether it would
    have to."""

    get: Callable[[], npt.NDArray[np.float32]]
    ready: Callable[[], bool] = lambda: True

    def __call__(self) -> npt.NDArray[np.float32]:
        return self.get()


class Guess(NamedTuple):
    """One expert that may be needed. `score`: how likely it is asked for when its layer is reached next, in [0, 1]."""

    layer: int
    expert: int
    score: float


class Facts(Protocol):
    """What predictors read of a profile (core.profile.Profile); None where it was not gathered."""

    @property
    def gate_recall(self) -> Floats | None:
        """[L] recall@k of each layer's router asked with the router input of the layer before; [0] is NaN."""

    @property
    def defaults(self) -> Floats | None:
        """[L, E, H] mean output of each expert."""

    @property
    def maps(self) -> Floats | None:
        """[N, L, E] router distributions of single tokens ..."""

    @property
    def map_keys(self) -> Floats | None:
        """[N, H] ... and what the embedding makes of them."""

    @property
    def first_table(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int16]] | None:
        """[V'] token ids, rising, and [V', k] their usual experts in layer 0, most frequent first, -1 for none."""

    def net(self, name: str) -> Net:
        """A trained network, which must be there."""


class View(Protocol):
    """What a predictor may look at while layer `layer` is computed; -1: the pass begins, and nothing is routed yet.

    Attributes cost nothing. Methods work only when called; those of the state need a predictor that `asks`, and each
    waits once for the device, unless it returns `Later`.
    """

    layer: int
    layers: int
    experts: int  # of one layer
    top_k: int
    request: int  # grows with every prompt: the tokens of one number are one conversation turn
    ids: Sequence[Sequence[int]]  # [T][k] experts the router just chose; empty where the pass begins
    tokens: Sequence[int]  # [T] the token ids of this pass; empty where they are not known
    profile: Facts | None

    @property
    def weights(self) -> Sequence[Sequence[float]]:
        """[T][k] what each chosen expert's output is multiplied with."""

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        """[n, E] how likely some token of the pass asks for each expert of each of `layers`, were their routers given
        this layer's router input ("hidden"), or ("default") the quasi-hidden state that default vectors make of it
        (Speculating Experts section 3.2). The k likeliest of one token are always what that router would choose."""

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        """[E] the same by the profile's estimator, which must be there."""

    def distribution(self) -> Later:
        """[E] softmax of this layer's router, mean over the pass's tokens."""

    def embedding(self) -> Later:
        """[H] what the embedding layer makes of the pass's tokens, mean over them."""

    def path(self) -> Net:
        """The profile's routing-path predictor, which must be there. Raises TraceError where the tokens it reads are
        not known."""


class Predictor(Protocol):
    """Names experts to fetch. Stateless or not, it is called once a layer, in order; a pass starts at layer 0."""

    looks: ClassVar[bool] = True  # False: never called, so nothing is recorded for it
    asks: ClassVar[bool] = False  # True: it looks at states, so what routers are given is kept for it
    defaults: ClassVar[bool] = False  # True: it asks with the "default" state
    starts: ClassVar[bool] = False  # True: `begin` is called before layer 0
    executes: ClassVar[bool] = False  # True: it always tells the next layer's whole routing, by `ask` or `estimate`
    needs: ClassVar[tuple[str, ...]] = ()  # parts of the profile (core.profile.PARTS) that it cannot do without
    patient: bool = False  # True in replays: it waits for what is worked out beside
    beside: AsyncWorker | None = None  # where its task is worked on; without, at once and here

    def task(self, view: View) -> Task | None:
        """What is to be worked out beside it, from `view.profile` and the sizes; None: nothing."""
        return None

    def begin(self, view: View) -> Sequence[Guess]:
        """Experts of the first layers, best first, before anything is routed: `view.layer` is -1."""
        return ()

    def predict(self, view: View) -> Sequence[Guess]:
        """Experts of later layers (or of the first layers of the next token, asked for at the last ones), best
        first."""

    def close(self) -> None:
        """Stop what runs beside; it is not called again."""
        return


def union(logs: Any, top_k: int) -> npt.NDArray[np.float64]:
    """How likely some token asks for an expert: 1 - (1 - p)^k of one that draws k experts by p, over all tokens.

    `logs`: sum over the tokens of log(1 - p), any shape. Rises with p, so the order of one token's experts stays.
    """
    told: npt.NDArray[np.float64] = -np.expm1(top_k * np.asarray(logs, np.float64))
    return told
