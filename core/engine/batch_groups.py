"""Which sequences that are answered together are computed in one pass: the batches that a scheduler chooses.

Two batches are a group (ExpertFlow section 3.3), divided anew for every token. Pipelined there are two groups: while
the second batch of one is computed, the other is divided, in a thread of its own, by what is known of each sequence's
next token (section 3.4).
"""

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from core.engine.batch_request import Regrouped
from core.engine.request_factory import ActiveRequest
from core.engine.sequence import Sequence as Text
from core.policy.batching import Scheduler, in_order, union_size
from core.policy.batching.unions import Paths
from core.types import ModelShape

Ids = npt.NDArray[np.int16]
Expected = Callable[[int], npt.NDArray[np.bool_] | None]
"""The experts that a predictor expects for a request's next token [L * E]; None where it expects none."""
SCHEDULED = 1000  # times of regrouping that are kept


@dataclass(slots=True, eq=False)
class Running:
    """A request that is being answered."""

    key: Hashable
    active: ActiveRequest
    path: Ids | None = None  # [L, k] the experts of its newest token, in the layers that decode; None before its first
    group: int = 0

    @property
    def sequence(self) -> Text:
        return self.active.sequence

    @property
    def unread(self) -> int:
        """Tokens to read before the next one can be drawn."""
        return self.active.unread


class BatchGroups:
    """Of one run: without a `scheduler` one batch, else groups of two batches of at most `size` sequences. `shape`: of
    the layers that decode. What was done is added to `regrouped`."""

    def __init__(
        self,
        scheduler: Scheduler | None,
        size: int,
        shape: ModelShape,
        expected: Expected,
        regrouped: deque[Regrouped],
        *,
        pipelined: bool,
    ) -> None:
        self._scheduler, self._size, self._shape = scheduler, size, shape
        self._expected, self._regrouped = expected, regrouped
        self._groups = 2 if scheduler is not None and pipelined else 1
        self._executor = ThreadPoolExecutor(1, "moestro-schedule") if self._groups > 1 else None
        self._pending: dict[int, Future[list[list[Running]]]] = {}  # by group: how its next tokens are divided
        self.places = size if scheduler is None else 2 * size * self._groups
        """Most sequences at work."""

    @property
    def follows(self) -> bool:
        """Whether it is of use to know the experts of a sequence's newest token."""
        return self._scheduler is not None

    def join(self, fresh: Running, running: Sequence[Running]) -> None:
        """Add a sequence to those at work: to the smaller group."""
        fresh.group = min(range(self._groups), key=lambda group: sum(one.group == group for one in running))

    def batches(self, running: Sequence[Running]) -> Iterator[list[Running]]:
        """The batches of the next token of every sequence, one after the other; each is computed before the next one is
        asked for."""
        if self._scheduler is None:
            yield list(running)
            return
        for group in range(self._groups):
            batches = self._divided(group, [one for one in running if one.group == group])
            for at, batch in enumerate(batches, 1):
                if at == len(batches) and self._executor is not None:
                    self._divide_ahead((group + 1) % self._groups, running)
                yield batch

    def close(self) -> None:
        """Nothing more is divided."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
        self._pending.clear()

    def _divide_ahead(self, group: int, running: Sequence[Running]) -> None:
        assert self._executor is not None
        own = [one for one in running if one.group == group and not one.sequence.over]
        if own:
            self._pending[group] = self._executor.submit(self._divide, own, self._paths(own))

    def _divided(self, group: int, own: list[Running]) -> list[list[Running]]:
        """The batches of a group. What was divided ahead loses the sequences that have left since, and new ones are
        put where there is room."""
        if not own:
            return []
        pending = self._pending.pop(group, None)
        if pending is None:
            return self._divide(own, self._paths(own))
        divided = pending.result()
        batches = [[one for one in batch if one in own] for batch in divided]
        for one in [one for one in own if not any(one in batch for batch in divided)]:
            room = min(batches, key=len, default=None)
            if room is None or len(room) >= self._size:
                batches.append(room := [])
            room.append(one)
        return [batch for batch in batches if batch]

    def _paths(self, own: Sequence[Running]) -> Paths:
        """[n, L * E] the experts that each sequence is expected to need: those that the predictor expects for its next
        token, or else those of its newest one."""
        layers, experts = self._shape.layers, self._shape.experts
        paths = np.zeros((len(own), layers, experts), np.bool_)
        for at, one in enumerate(own):
            expected = self._expected(one.sequence.request)
            if expected is not None:
                paths[at] = expected.reshape(layers, experts)
            elif one.path is not None:
                np.put_along_axis(paths[at], one.path.astype(np.int64), True, 1)
        return paths.reshape(len(own), -1)

    def _divide(self, own: Sequence[Running], paths: Paths) -> list[list[Running]]:
        assert self._scheduler is not None
        began_s = time.perf_counter()
        batches = self._scheduler.regroup(paths, self._size)
        took_ms, cells = (time.perf_counter() - began_s) * 1e3, self._shape.layers * len(batches)
        arrival = union_size(paths, in_order(len(own), self._size)) / cells
        self._regrouped.append(Regrouped(took_ms, arrival, union_size(paths, batches) / cells))
        return [[own[at] for at in batch] for batch in batches]
