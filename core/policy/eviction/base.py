"""The interface of eviction policies: a score for every resident; the lowest is evicted first.

One object orders all experts of a model, or of several caches of it in parallel: it does not know how they are divided
into pools. The engine calls it for one expert at a time, the simulator for one of every layer at once, so every method
takes a single id or an array of distinct ids and is written once, in numpy indexing that works for both."""

from collections.abc import Callable, Collection
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from core.policy.hints import Hints
from core.settings.param import Choice
from core.settings.registry import create

Ids = int | npt.NDArray[np.integer]  # one id or an array of distinct ones; ticks and layers have the same shape
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
GONE = np.inf  # the score of an expert that is not resident
RECENT = 2.0**-32  # weight of a tick: a fraction, so that integers decide first


class ExpertIndex:
    """The experts a policy orders: `copies` caches x layers x experts. id = (copy * layers + layer) * experts + expert.

    `layer_of` and `eid` [size] = the layer of an id, and its number within its copy. The arrays of `hints` are
    attributes by the same names: the same objects, or for several copies, repetitions of their present values."""

    def __init__(self, layers: int, experts: int, copies: int = 1, hints: Hints | None = None) -> None:
        self.layers, self.experts, self.copies = layers, experts, copies
        self.size = copies * layers * experts
        self.eid: Ints = np.arange(self.size) % (layers * experts)
        self.layer_of: Ints = self.eid // experts
        self.hints = hints or Hints(layers, experts)
        arrays = self.hints.repeated(copies)
        self.probability: Floats = arrays["probability"]
        self.predicted: npt.NDArray[np.bool_] = arrays["predicted"]
        self.usual: Floats = arrays["usual"]
        self.pinned: npt.NDArray[np.bool_] = arrays["pinned"]

    def distance(self, part: slice, layer: Ids) -> Floats | float:
        """Layers until the layer of each id is reached again while `layer` is computed: 0 for the next one, layers - 1
        for `layer` itself, whose experts are already chosen."""
        if layer is self.layer_of:  # every layer for itself
            return self.layers - 1.0
        ahead: Floats = np.subtract(self.layer_of[part], layer, dtype=np.float64) - 1.0
        ahead += (ahead < 0) * self.layers
        return ahead


class Eviction:
    """Base of all policies. The lowest of `scores` is evicted; ties go to the lowest id. Every choice is deterministic.

    `tick` increases with every request of a pool, `now` counts the tokens of all passes, this one's included, `layer`
    is the one being computed. The cache calls `admitted` when an expert gets a slot, `used` for every request of a
    resident (if it was missing, after `admitted`), and `left` when it is evicted. All tokens of a pass that choose an
    expert make one request; a policy that `counts_tokens` gets their number with `chosen` before it."""

    retains: ClassVar[bool] = True  # False: an expert is evicted as soon as the step that used it is over
    time_dependent: ClassVar[bool] = False  # True: scores also change with time, so `scores` recomputes them
    uses_hints: ClassVar[bool] = False  # True: scores depend on what predictors write to expert_index.hints
    counts_tokens: ClassVar[bool] = False  # True: `chosen` is called before the requests of several tokens

    def __init__(self, expert_index: ExpertIndex) -> None:
        self.expert_index = expert_index
        self.score: Floats = np.full(expert_index.size, GONE)  # GONE for non-residents only
        self._static: tuple[tuple[int, int], Floats] | None = None  # of which hints and layer (-1: each for itself)

    def admitted(self, ids: Ids, tick: Ids, now: int) -> None:
        """These experts got slots. Sets a finite score: a prefetched expert may not be used for long."""
        self.score[ids] = tick

    def chosen(self, ids: Ids, tokens: Ids) -> None:
        """So many tokens of a pass choose each of `ids`, which are then requested once."""

    def used(self, ids: Ids, tick: Ids, now: int) -> None:
        """The residents `ids` were requested."""

    def left(self, ids: Ids) -> None:
        """These experts are no longer resident."""
        self.score[ids] = GONE

    def scores(self, part: slice, now: int, layer: Ids) -> Floats:
        """Scores of the experts of `part`, evicted in ascending order: a view of `score`, or a new array if the policy
        is `time_dependent`. GONE for non-residents. `layer`: one number, or one per id of the part."""
        return self.score[part]

    def static_score(self, part: slice, layer: Ids) -> Floats:
        """For time-dependent policies: the part of the scores that depends on layers and hints alone."""
        return np.zeros(part.stop - part.start)

    def cached_static_score(self, part: slice, layer: Ids) -> Floats:
        """`static_score`; cached until hints change, where every layer is computed for itself or `layer` is a
        number."""
        expert_index = self.expert_index
        if layer is expert_index.layer_of:
            key = expert_index.hints.version, -1
        elif isinstance(layer, int):
            key = expert_index.hints.version, layer
        else:
            return self.static_score(part, layer)
        if self._static is None or self._static[0] != key:
            self._static = key, self.static_score(slice(0, expert_index.size), layer)
        return self._static[1][part]


def victim(policy: Eviction, part: slice, now: int, layer: int, *blocked: Collection[int]) -> int | None:
    """The resident of `part` to evict next that is in no container of `blocked`; None when there is none."""
    scores = policy.scores(part, now, layer)
    at = int(scores.argmin())
    if scores[at] != GONE and any(part.start + at in some for some in blocked):
        if not policy.time_dependent:
            scores = scores.copy()
        scores[[eid - part.start for some in blocked for eid in some if part.start <= eid < part.stop]] = GONE
        at = int(scores.argmin())
    return None if scores[at] == GONE else part.start + at


MakePolicy = Callable[[ExpertIndex], Eviction]


def policy_maker(eviction: Choice) -> MakePolicy:
    """A function that makes a fresh policy over the experts it is given."""

    def make(expert_index: ExpertIndex) -> Eviction:
        policy: Eviction = create("eviction", *eviction, expert_index=expert_index)
        return policy

    return make
