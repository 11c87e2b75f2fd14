"""What the user's own answers say of the next ones: measured where the configuration was used before, replayed where it
was not, with the link that the model has or had last."""

from __future__ import annotations

import logging
import sqlite3
import statistics
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from app.services.analysis.measured import measure
from app.services.analysis.sources import as_pass
from app.services.candidates import is_pack
from app.services.runs import settings_in_force
from app.store import Load, Store
from core.errors import MoestroError
from core.memory.link import Link
from core.profile import Profile
from core.settings.cache import CacheSettings
from core.settings.config import KINDS, Settings, general
from core.settings.link import LinkSettings
from core.settings.loading import LoadSpec
from core.settings.lossy import LossySettings
from core.settings.prefetch import PrefetchSettings
from core.settings.registry import variant
from core.simulate import Clock
from core.types import Fit, Outcome

if TYPE_CHECKING:  # it needs torch, and a start of the dashboard does not
    from core.capacity.forecast import Seen

log = logging.getLogger("moestro.app")
LOADS = 24  # of the model, the last ones, that are looked at
LAST = 256  # decoded tokens that figures are over: the last ones
ENOUGH = 24  # decoded tokens of a configuration whose speed counts as measured
TRACED = 192  # recorded tokens that other configurations are replayed on
NARROW, WIDE = 0.05, 0.1  # uncertainty of a measured speed, as a share: at least, and after few answers
FEW = 3  # answers, or fewer, whose differences say nothing
SAME = ("dtype", "dense", "arithmetic", "device", "host", "threads", "blocks", "draft")
"""With the format: what a speed depends on."""
BEFORE = {"blocks": 1, "arithmetic": "reference", "draft": ""}  # of loads from before this could be chosen
FREE = ("budget", "slots")  # settings that the number of slots of a pass shows


@dataclass(frozen=True, slots=True)
class Decoded:
    """A decoded token of an answer, with the settings in force as text."""

    answer: tuple[int, int | None]  # its load and its message
    slots: int
    settings: Mapping[str, str]
    row: sqlite3.Row


class OwnAnswers:
    """Reads the store. `current` = the manifest of the loaded model, None while there is none; `profiles` finds the
    profile of a model by its hash."""

    def __init__(
        self,
        store: Store,
        current: Callable[[], Mapping[str, object] | None],
        profiles: Callable[[str], Profile | None],
    ) -> None:
        self._store, self._current, self._profiles = store, current, profiles

    def seen(self, spec: LoadSpec) -> Seen:
        """What a forecast of `spec` rests on; what is damaged is left out."""
        from core.capacity.forecast import Seen

        try:
            return self._seen(spec)
        except (MoestroError, ValueError, TypeError) as error:
            log.warning("the estimate goes without what was recorded, which cannot be read: %s", error)
            return Seen()

    def measured(self, spec: LoadSpec, fit: Fit) -> Fit:
        """The estimate with the speed and hit rate of answers under this very configuration, if there are enough."""
        try:
            return fit if fit.problem else self._measured(spec, fit)
        except (MoestroError, ValueError, TypeError) as error:
            log.warning("the estimate goes without your answers, which cannot be read: %s", error)
            return fit

    def known(self, spec: LoadSpec) -> tuple[Profile | None, Link | None]:
        """The profile of a model that was loaded before, and the link that `spec` has or will have; None = unknown."""
        try:
            loads = self._loads(spec.model)
            model_hash = str(loads[0].manifest.get("model_hash", "")) if loads else ""
            return self._profiles(model_hash) if model_hash else None, self._link(spec, loads)
        except (MoestroError, ValueError, TypeError) as error:
            log.warning("what was recorded of %s cannot be read: %s", spec.model, error)
            return None, None

    def _seen(self, spec: LoadSpec) -> Seen:
        from core.capacity.forecast import Seen

        loads = self._loads(spec.model)
        link = self._link(spec, loads)
        trace = self._store.steps.trace(spec.model, TRACED)
        if not loads or trace is None:
            return Seen(link)
        model_hash = str(loads[0].manifest.get("model_hash", ""))
        profile = self._profiles(model_hash) if model_hash else None
        same = [load for load in loads if _alike(load, spec)]
        plain = self._decoded(same, lambda force: _agree(force, spec.settings, LossySettings))
        timed = [one for one in plain if _agree(one.settings, spec.settings, LinkSettings)]
        paced = spec.settings.link.kind == "emulated" and link is not None
        if not timed and not paced:
            return Seen(link, trace, profile=profile)
        shape = loads[0].shape
        passes = [as_pass(one.row, shape.layers) for one in (timed or plain)]
        measured = measure(passes, shape.top_k, link.copy_ms(shape.expert_bytes) if link is not None else None)
        if measured is None:
            return Seen(link, trace, profile=profile)
        clock: Clock = measured.clock
        if not timed and link is not None:
            clock = replace(clock, load_ms=link.copy_ms(shape.expert_bytes))
        took_ms = statistics.fmean(one.total_ms for one in passes)
        slowdown = max(1.0, took_ms / measured.predicted_ms) if measured.predicted_ms else 1.0
        return Seen(link, trace, clock, measured.passes, measured.error, slowdown, profile)

    def _measured(self, spec: LoadSpec, fit: Fit) -> Fit:
        same = [load for load in self._loads(spec.model) if _alike(load, spec)]
        groups = CacheSettings, PrefetchSettings, LinkSettings, LossySettings
        found = self._decoded(same, lambda force: _agree(force, spec.settings, *groups), fit.slots, routed=False)
        if len(found) < ENOUGH:
            return fit
        tpot_ms = statistics.fmean(one.row["total_ms"] for one in found)
        wide = _spread(found)
        outcomes = np.concatenate([np.frombuffer(one.row["outcome"], "u1") for one in found])
        hit = float((outcomes <= Outcome.PREFETCH_HIT).mean()) if outcomes.size else 1.0
        answers = len({one.answer for one in found})
        return replace(
            fit,
            hit_low=hit,
            hit_high=hit,
            tok_s_low=1e3 / (tpot_ms * (1 + wide)),
            tok_s_high=1e3 / (tpot_ms * (1 - wide)),
            basis=f"measured: the last {len(found)} tokens of {answers} of your answers with these very settings",
        )

    def _loads(self, model: str) -> list[Load]:
        """The last loads of a model, latest first."""
        rows = self._store.db.rows("SELECT id FROM loads WHERE model = ? ORDER BY id DESC LIMIT ?", model, LOADS)
        return self._store.steps.loads([row["id"] for row in rows])[::-1]

    def _link(self, spec: LoadSpec, loads: Sequence[Load]) -> Link | None:
        """The link that `spec` has or will have, as far as it is known."""
        wanted = spec.settings.link
        if wanted.kind == "emulated":
            return Link(wanted.gbps, wanted.latency_us, True)
        now = self._current()
        known = [now] if now is not None and now.get("model") == spec.model else []
        for manifest in [*known, *(load.manifest for load in loads)]:
            link = Link.read(manifest)
            kind = _text(manifest.get("settings"), "link")
            if link is not None and kind == wanted.kind and manifest.get("host", spec.host) == spec.host:
                return link
        return None

    def _decoded(
        self,
        loads: Sequence[Load],
        wanted: Callable[[Mapping[str, str]], bool],
        slots: int | None = None,
        *,
        routed: bool = True,
    ) -> list[Decoded]:
        """The last decoded tokens of these loads under settings that are `wanted`, latest first; with so many slots.
        `routed`: only those whose routing was recorded, as that of text-to-text models is not."""
        found: list[Decoded] = []
        for load in loads:
            steps, forces = settings_in_force(self._store, load)
            fits = [wanted(force) for force in forces]
            if not any(fits):
                continue
            rows = self._store.db.rows(
                "SELECT step, answer, slots, total_ms - record_ms AS total_ms, stall_ms, layer, outcome, transfers "
                "FROM steps WHERE load = ? AND phase = 'decode' AND tokens = 1 AND (layers > 0 OR NOT ?) "
                "AND slots = coalesce(?, slots) ORDER BY id DESC LIMIT ?",
                load.id,
                routed,
                slots,
                LAST,
            )
            for row in rows:
                at = bisect_right(steps, row["step"])
                if fits[at] and len(found) < LAST:
                    found.append(Decoded((load.id, row["answer"]), row["slots"], forces[at], row))
            if len(found) >= LAST:
                break
        return found


def _alike(load: Load, spec: LoadSpec) -> bool:
    """Whether a load computes as `spec` would. A pack has the one format."""
    wanted = spec.describe()
    had = {**wanted, **BEFORE, **load.spec}
    return all(had[name] == wanted[name] for name in SAME) and (
        is_pack(spec.model) or load.spec.get("format", spec.format) == spec.format
    )


def _agree(had: Mapping[str, str], wanted: Settings, *groups: type) -> bool:
    """Whether passes had the settings of these groups, and those of their chosen variants; one that was not recorded
    was at its default."""
    default = Settings()
    for name in general(*groups):
        if name in FREE:
            continue
        if had.get(name, str(default[name])) != str(wanted[name]):
            return False
        if name in KINDS:
            chosen = variant(name, str(wanted[name]))
            own = (chosen.full_name(param) for param in chosen.params)
            if any(had.get(full, str(default[full])) != str(wanted[full]) for full in own):
                return False
    return True


def _spread(found: Sequence[Decoded]) -> float:
    """How far an answer's time per token is from the mean, as a share of it."""
    of: dict[Any, list[float]] = defaultdict(list)
    for one in found:
        of[one.answer].append(one.row["total_ms"])
    if len(of) <= FEW:
        return WIDE
    means = [statistics.fmean(times) for times in of.values()]
    return min(0.5, max(NARROW, statistics.stdev(means) / statistics.fmean(means)))


def _text(settings: object, name: str) -> str:
    return str(settings.get(name, "auto")) if isinstance(settings, Mapping) else "auto"
