"""The predictor interface: from the layer about to be computed, it predicts the experts of later layers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from core.policy.predict.worker import AsyncWorker, WorkerTask

Floats = npt.NDArray[np.floating]
Net = tuple[Mapping[str, int], Mapping[str, npt.NDArray[Any]]]  # a network's configuration and its weights
State = Literal["hidden", "default", "last"]


@dataclass(frozen=True, slots=True)
class Later:
    """Values that the device may still be computing: a call waits for them, and `ready` says whether they are there."""

    get: Callable[[], npt.NDArray[np.float32]]
    ready: Callable[[], bool] = lambda: True

    def __call__(self) -> npt.NDArray[np.float32]:
        return self.get()


class Prediction(NamedTuple):
    """One expert that may be needed. `score`: probability that it is requested when its layer is reached next, in [0,
    1]."""

    layer: int
    expert: int
    score: float


class LayerMap(NamedTuple):
    """What a search found for a whole layer: `distribution` [E], the router probabilities of all its experts."""

    layer: int
    distribution: npt.NDArray[np.float32]


PriorityFormula = Callable[[float, float, int], float]
"""(score, p, distance) -> the priority of a prefetch, the highest first. `score` as in Prediction; `p`: the probability
that a map of the layer gives the expert, in [0, 1], or the score where there is no map; `distance`: layers until the
expert's own, at least 1, counted on into the next token."""


def by_score(score: float, p: float, distance: int) -> float:
    """For predictors whose source gives no order: FineMoE's, with the probability that the expert is requested."""
    return score / distance


class PredictorProfile(Protocol):
    """The parts of a profile (core.profile.Profile) that predictors read; None where not measured."""

    @property
    def gate_recall(self) -> Floats | None:
        """[L] recall@k of each layer's router given the router input of the layer before; [0] is NaN."""

    @property
    def default_recall(self) -> Floats | None:
        """[L] the same given the quasi-hidden state of the layer before."""

    @property
    def defaults(self) -> Floats | None:
        """[L, E, H] mean output of each expert."""

    @property
    def maps(self) -> Floats | None:
        """[N, L, E] router distributions of single tokens."""

    @property
    def map_keys(self) -> Floats | None:
        """[N, H] the embeddings of the tokens of `maps`."""

    def net(self, name: str) -> Net:
        """A trained network, which the profile must contain."""


class RouterPlan(NamedTuple):
    """What a predictor names in each layer of a token, if that is all it does: the likeliest experts by the routers of
    the next `distance` layers given this layer's router input, at most `width` of each (0 = top-k); and in the `last`
    layer those of layer 0, by its router given the last layer's input ("state"), or as this token had them ("experts"),
    or none (""). So a program can ask the routers, and need not call it where all that it would name is in slots."""

    distance: int
    width: int
    last: Literal["state", "experts", ""]


class View(Protocol):
    """What a predictor can read while layer `layer` is computed; -1: the pass begins, and nothing is routed yet.

    Attributes cost nothing. Methods compute only when called; those on states need a predictor with `asks`, and each
    waits once for the device, unless it returns `Later`."""

    layer: int
    layers: int
    experts: int  # of one layer
    top_k: int
    request: int  # increases with every prompt: tokens with the same number belong to one conversation turn
    ids: Sequence[Sequence[int]]  # [T][k] experts the router just chose; empty before the first layer
    tokens: Sequence[int]  # [T] the token ids of this pass; empty where unknown
    shares: Sequence[tuple[int, Sequence[int]]]  # of a pass over several sequences: each one's request and token ids
    profile: PredictorProfile | None

    @property
    def weights(self) -> Sequence[Sequence[float]]:
        """[T][k] factor of each chosen expert's output."""

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        """[n, E] probability that some token of the pass requests each expert of each of `layers`, if their routers
        were given this layer's router input ("hidden"), or ("default") the quasi-hidden state built from it with
        default vectors (Speculating Experts section 3.2); "last" is the input of the last token alone, for the token
        that follows. For one token, the k likeliest are always what that router would choose."""

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        """[E] the same by the profile's estimator, which must exist, from the state that it was trained on."""

    def distribution(self) -> Later:
        """[E] softmax of this layer's router, mean over the pass's tokens."""

    def embedding(self) -> Later:
        """[H] the embedding layer's output for the pass's tokens, mean over them."""

    def path(self) -> Net:
        """The profile's routing-path predictor, which must exist. Raises TraceError where the tokens it reads are
        unknown."""


def shares_of(view: View) -> Sequence[tuple[int, Sequence[int]]]:
    """The requests of a pass, with the token ids of each."""
    return view.shares or ((view.request, view.tokens),)


class AnswerWait(Protocol):
    """What a predictor tells of the searches that it gives to its worker, by number, so that a pass may wait for one:
    `core.runtime.prediction.answer_wait.AnswerWait`."""

    def asked(self, number: int, tokens: int) -> None:
        """A search for so many tokens was given to the worker."""

    def answered(self, number: int) -> None:
        """Its answer is there."""

    def wait(self, number: int, tokens: int, there: Callable[[], bool]) -> None:
        """A pass over so many tokens begins: returns when the answer is `there`, or when waiting longer would cost more
        than it saves."""


class Predictor(Protocol):
    """Predicts experts to fetch. Called once per layer, in order, whether stateless or not; a pass starts at layer
    0."""

    looks: ClassVar[bool] = True  # False: never called, so nothing is recorded for it
    asks: ClassVar[bool] = False  # True: it reads states, so router inputs are kept for it
    defaults: ClassVar[bool] = False  # True: it calls `ask` with the "default" state
    starts: ClassVar[bool] = False  # True: `begin` is called before layer 0
    maps: ClassVar[bool] = False  # True: `take_maps` returns what it found
    batches: ClassVar[bool] = False  # True: it can be asked about a pass over tokens of several sequences
    executes: ClassVar[bool] = False  # True: it always predicts the next layer's whole routing, by `ask` or `estimate`
    needs: ClassVar[tuple[str, ...]] = ()  # parts of the profile (core.profile.PARTS) that it requires
    priority: PriorityFormula = staticmethod(by_score)  # the order of its prefetches
    routers: RouterPlan | None = None  # None: it has to be called in every layer
    patient: bool = False  # True in replays: it waits for its worker
    worker: AsyncWorker | None = None  # the worker of its task; None: runs inline
    wait: AnswerWait | None = None  # lets a pass wait for its worker; None: nothing waits, unless it is `patient`

    def task(self, view: View) -> WorkerTask | None:
        """The task of its worker, from `view.profile` and the sizes; None: no worker."""
        return None

    def announce(self, view: View) -> None:
        """The tokens of the coming pass are known, maybe while another one still runs: a search that needs no more may
        begin. `view.layer` is -1. The pass may yet not come."""
        return

    def begin(self, view: View) -> Sequence[Prediction]:
        """Experts of the first layers, best first, before anything is routed: `view.layer` is -1."""
        return ()

    def predict(self, view: View) -> Sequence[Prediction]:
        """Experts of later layers (or at the last layers, of the first layers of the next token), best first."""

    def passed(self, layer: int, ids: Sequence[int]) -> None:
        """In place of `predict`, by its `routers`: `layer` computed the experts `ids` of one token, and all that it
        would have named is in slots."""
        return

    def arrived(self, at: int) -> Sequence[Prediction]:
        """The predictions of its worker's answers since the last call of this or another method, best first. Called
        when answers may have come while layer `at` (-1: before the first) is computed; maybe on another thread, but
        never during another call."""
        return ()

    def expected(self, request: int) -> npt.NDArray[np.bool_] | None:
        """[L * E] the experts that the next token of a request is predicted to need; None while that is not known."""
        return None

    def take_maps(self) -> Sequence[LayerMap]:
        """The maps of whole layers found since the last call, oldest first: also those that came too late to prefetch
        by."""
        return ()

    def close(self) -> None:
        """Stop its worker; the predictor is not called again."""
        return


def has_worker(kind: Any) -> bool:
    """Whether predictors of this class give work to a worker, so that their answers may come late."""
    return bool(getattr(kind, "task", Predictor.task) is not Predictor.task)


def needs_recording(kind: Any) -> bool:
    """Whether recorded routing alone does not tell what predictors of this class would have named, and when."""
    return bool(getattr(kind, "asks", False)) or has_worker(kind)


def union(logs: Any, top_k: int) -> npt.NDArray[np.float64]:
    """Probability that some token requests an expert: 1 - (1 - p)^k for one token that draws k experts by p, over all
    tokens.

    `logs`: sum over the tokens of log(1 - p), any shape. Increases with p, so the order of one token's experts is kept.
    """
    predicted: npt.NDArray[np.float64] = -np.expm1(top_k * np.asarray(logs, np.float64))
    return predicted
