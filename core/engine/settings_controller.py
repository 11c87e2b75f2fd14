"""Applies settings: they may be requested at any time and on any thread, and take effect between two forward passes.

All effects of a setting or a profile on a loaded model happen here, on the compute thread.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from core.cache.expert_cache import ExpertCache
from core.capacity.memory_accounting import Ledger
from core.capacity.pieces import borrowed_slots, piece
from core.capacity.sizes import PromptPiece, Sizes
from core.engine.drafter import Drafter
from core.engine.lossy_check import check_allowed, check_weighable, with_substitute
from core.engine.prefix_cache import PrefixCache
from core.errors import BudgetError, SettingError
from core.hf.weighing import Rule
from core.memory.arena import Arena
from core.memory.link_emulation import LinkEmulation
from core.memory.transfer import TransferEngine
from core.policy.allocation.slot_allocation import Placement, check_needs, place
from core.policy.throttle import Throttle
from core.profile import Profile
from core.runtime.device_decode import DeviceDecode
from core.runtime.host_compute import HostCompute
from core.runtime.kv_pool import KVPool
from core.runtime.miss import MissPolicy
from core.runtime.prediction.predictor_host import PredictorHost
from core.runtime.recorder import Recorder
from core.runtime.telemetry import Telemetry
from core.runtime.trace_capture import TraceCapture
from core.settings.config import Settings

Rules = Callable[[], Sequence[Rule | None]]
ROOM_BYTES = 256 << 20  # of slots, freed at once when the device is out of memory


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """What holds the memory of a loaded model: experts in slots, copies into them, sequences, and the account."""

    arena: Arena
    expert_cache: ExpertCache
    transfers: TransferEngine
    link: LinkEmulation
    pool: KVPool
    prefix_cache: PrefixCache
    ledger: Ledger
    link_gbps: float  # measured: the slowest tier that delivers experts


@dataclass(frozen=True, slots=True)
class PredictionParts:
    """What predicts, what judges that, and what acts on it."""

    predictor_host: PredictorHost
    capture: TraceCapture
    throttle: Throttle
    miss: MissPolicy


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of a loaded model that settings act on. Those with `configure(old, new)` take their group of settings
    from it, between two passes; `old` is None at first, and whenever everything is to be set up anew."""

    memory: MemoryParts
    prediction: PredictionParts
    telemetry: Telemetry
    recorder: Recorder
    device_decode: DeviceDecode
    host: HostCompute
    drafter: Drafter


class SettingsController:
    """`wanted` holds the requested settings, `applied` the active ones. Thread-safe except for `apply`."""

    def __init__(self, settings: Settings, sizes: Sizes, profile: Profile | None = None, rules: Rules = tuple) -> None:
        """Raises SettingError when the settings need another profile or model, or pin experts that do not exist.
        `rules`: how each layer's router weights its experts, called at most once, and only when needed."""
        self._sizes, self._rules = sizes, cache(rules)
        self._last: tuple[tuple[object, ...], Profile | None, Placement] | None = None
        self.placed = self._checked(settings, profile)
        self.applied = self.wanted = settings
        self.profile = profile
        self._pending: dict[str, object] = {}
        self._borrowed = 0  # slots whose memory a long piece of a prompt uses
        self._turn = threading.Lock()

    def ask(self, changes: Mapping[str, object], check: Callable[[Settings], None]) -> Settings:
        """Request changed settings, as `with_substitute` has them. Raises SettingError, or what `check` raises, and
        then requests nothing."""
        with self._turn:
            new = with_substitute(self.wanted.with_(changes), changes, self.profile, self._sizes.shape)
            check(new)
            self._checked(new, self.profile)
            self.wanted = new
        return new

    def ask_profile(self, profile: Profile | None) -> None:
        """Request another profile. Raises SettingError when the settings need more than it contains."""
        with self._turn:
            self._checked(self.wanted, profile)
            self.profile = profile

    def _checked(self, settings: Settings, profile: Profile | None) -> Placement:
        """The placement of experts by these settings. Raises SettingError when it is impossible, or the profile lacks
        something else that they need."""
        check_needs(settings, profile, measurable=not self._sizes.shape.encoder_layers)
        if self._sizes.blocks == 1 and settings.cache.split.name != "whole":
            raise SettingError(
                "The model was loaded with whole experts, of which no part can stay alone. Load it again with several "
                "blocks per expert (--blocks)."
            )
        check_allowed(settings, self._sizes.shape, profile)
        check_weighable(settings, self._rules)
        placed = self._placement(settings, profile)
        if problem := placed.problem(self._slots(settings, placed)):
            raise SettingError(problem)
        return placed

    def _placement(self, settings: Settings, profile: Profile | None) -> Placement:
        """The placement, cached while the settings and the profile it depends on are the same."""
        cache = settings.cache
        key = cache.scope, cache.layer_slots, cache.pins, cache.bypass, cache.split, cache.buffer
        if self._last is None or self._last[0] != key or self._last[1] is not profile:
            shape, blocks = self._sizes.shape, self._sizes.blocks
            placed = place(cache, shape.layers, shape.experts, shape.top_k, profile, blocks, shape.heads)
            self._last = key, profile, placed
        return self._last[2]

    def take_changes(self) -> dict[str, object]:
        """The settings that took effect since the last call."""
        changes, self._pending = self._pending, {}
        return changes

    def apply(self, to: EngineParts) -> None:
        """Bring all parts to the requested settings. Only between two passes, on the compute thread."""
        with self._turn:
            old, new, profile = self.applied, self.wanted, self.profile
            if old is new and to.prediction.predictor_host.profile is profile:
                return
            self.applied, before = new, self.placed
            self.placed = self._placement(new, profile)
        to.device_decode.recall()
        changed = old.diff(new)
        for name, value in changed.items():
            turned = ("on" if value else "off") if isinstance(value, bool) else f"{old[name]} → {value}"
            to.telemetry.mark(to.recorder.index, f"{name} {turned}")
        self._pending |= changed
        to.memory.ledger.hold_to(new)
        if old.link.captures and not new.link.captures:
            to.device_decode.drop_graphs()  # whose memory slots get
        to.recorder.configure(old.telemetry, new.telemetry)
        to.memory.link.configure(old.link, new.link)
        to.prediction.throttle.enabled = new.prefetch.compares
        if changed:
            to.prediction.throttle.restart(str(new.prefetch))  # what these measured was of other settings
            to.host.throttle.restart()
            to.prediction.predictor_host.answer_wait.restart()
        if changed.keys() - {"drafts"}:
            to.drafter.restart()  # that of drafts changes no time of a pass
        to.memory.prefix_cache.configure(old.kv, new.kv)
        if to.prediction.predictor_host.profile is not profile:
            to.memory.prefix_cache.clear()
        anew = to.prediction.predictor_host.configure(old.prefetch, new.prefetch, profile)
        if anew:
            to.memory.expert_cache.hints.forget()  # of another predictor
        to.prediction.capture.shadows.configure(new, profile)
        to.prediction.miss.configure(None if anew else old.lossy, new.lossy, profile)
        slots = self.slots
        resized = old.cache.budget != new.cache.budget or self._slots(old, before) != slots
        if resized or old.cache != new.cache or self.placed is not before:
            self.reserve_workspace(to, 0)  # how many slots can be borrowed follows from these
        if self._sizes.under(old).slot < self._sizes.under(new).slot:  # slots are about to grow
            self._reshape(to, min(slots, to.memory.expert_cache.slots))
        to.memory.expert_cache.configure(old.cache, new.cache, None if self.placed is before else self.placed)
        to.memory.expert_cache.prefetch_by(old.prefetch, new.prefetch)
        if resized:
            self._reshape(to, slots)
        if self.placed.pinned or self.placed is not before:
            to.memory.expert_cache.pin(self.placed.pinned)
        to.host.configure(old.misses, new.misses)
        to.drafter.configure(old.drafts, new.drafts)
        to.device_decode.configure(old.link, new.link)

    def make_room(self, to: EngineParts) -> bool:
        """The device ran out of memory in a pass: free some slots, as if a lower budget had been requested. False when
        no token could do with fewer. Only between two passes, on the compute thread."""
        cache = to.memory.expert_cache
        fewer = max(cache.slots // 16, -(-ROOM_BYTES // self._sizes.slot))
        slots = max(self._sizes.slots_min(self.applied.cache.scope), cache.slots - fewer)
        if slots >= cache.slots or not self._works(to, slots):
            return False
        cache.reshape(slots=slots)
        self._hold(to, "the device ran out of memory: fewer experts are kept on it")
        return True

    def max_prefill_chunk(self, to: EngineParts, unread: int) -> int:
        """In pieces of how many tokens `unread` ones of prompts are to be read with borrowed memory; 0 = without."""
        slots = to.memory.expert_cache.slots + self._borrowed
        found = piece(self._sizes, slots, unread, lambda slots: self._works(to, slots)).chunk
        return found if found > self._sizes.chunk else 0

    def reserve_workspace(self, to: EngineParts, tokens: int) -> bool:
        """A pass over so many tokens of prompts follows, 0 = any other: borrow the memory of as many slots as it needs
        beyond the workspace, and give back what another pass does not need any more. False, with nothing borrowed,
        where the slots cannot be spared. Only between two passes, on the compute thread."""
        sizes, usual = self._sizes, PromptPiece(self._sizes.chunk, 0)
        wanted = next((one for one in (usual, *sizes.longer) if one.chunk >= tokens), usual)
        slots, room = to.memory.expert_cache.slots + self._borrowed, borrowed_slots(sizes, wanted)
        while room and slots > room and self._freed(slots, room) < wanted.extra:
            room += 1
        if room and not self._works(to, slots - room):
            self.reserve_workspace(to, 0)
            return False
        if room == self._borrowed:
            return True
        if room > self._borrowed:
            to.telemetry.mark(to.recorder.index, f"a long prompt borrows the memory of {room // sizes.blocks} experts")
        to.memory.ledger.borrowed = min(to.memory.ledger.borrowed, wanted.extra)
        self._borrowed = room
        self._reshape(to, slots - room)
        to.memory.ledger.borrowed = wanted.extra
        return True

    def _works(self, to: EngineParts, slots: int) -> bool:
        """Whether every token can be computed with so many."""
        return slots >= self._sizes.slots_min(self.applied.cache.scope) and not self.placed.problem(slots)

    def _freed(self, slots: int, fewer: int) -> int:
        """Bytes that so many fewer slots take."""
        sizes = self._sizes.under(self.applied)
        return sizes.taken(self.placed.sizes(slots)) - sizes.taken(self.placed.sizes(slots - fewer))

    @property
    def slots(self) -> int:
        """That the applied budget pays for."""
        return self._slots(self.applied, self.placed)

    def _slots(self, settings: Settings, placed: Placement) -> int:
        """That a budget pays for."""
        return self._sizes.under(settings).slots_of(settings.cache.budget, placed.sizes)

    def _reshape(self, to: EngineParts, slots: int) -> None:
        try:
            to.memory.expert_cache.reshape(slots=slots)
        except BudgetError as error:  # the device ran full while growing: keep the size reached, and report it
            self._hold(to, str(error))

    def _hold(self, to: EngineParts, because: str) -> None:
        """The budget is what the slots take now."""
        sizes = self._sizes.under(self.applied)
        held = {"budget": str(sizes.bytes(to.memory.expert_cache.slots + self._borrowed))}
        self.applied = self.applied.with_(held)
        to.memory.ledger.hold_to(self.applied)
        with self._turn:
            self.wanted = self.wanted.with_(held)
        to.telemetry.mark(to.recorder.index, because)


def begin(settings: Settings, to: EngineParts) -> None:
    """Apply initial settings that the parts were not built with."""
    to.recorder.configure(None, settings.telemetry)
    to.memory.link.configure(None, settings.link)
    to.memory.expert_cache.prefetch_by(None, settings.prefetch)
    to.prediction.throttle.enabled, to.prediction.throttle.after = settings.prefetch.compares, to.host.throttle
    to.prediction.throttle.restart(str(settings.prefetch))
    to.prediction.throttle.say = lambda text: to.telemetry.mark(to.recorder.index, text)
    to.prediction.capture.shadows.configure(settings, to.prediction.predictor_host.profile)
    to.prediction.miss.configure(None, settings.lossy, to.prediction.predictor_host.profile)
    to.device_decode.say = to.drafter.say = to.host.say = to.host.throttle.say = to.prediction.throttle.say
    to.host.configure(None, settings.misses)
    to.drafter.configure(None, settings.drafts)
    to.device_decode.configure(None, settings.link)


def check_early(settings: Settings, sizes: Sizes, finds_profiles: bool) -> None:
    """Before a model is read: raises SettingError for settings that no profile could make valid, or that need a profile
    when `finds_profiles` is False."""
    if not finds_profiles:
        SettingsController(settings, sizes)
    shape = sizes.shape
    settings.cache.pins.eids(shape.layers, shape.experts, np.zeros((shape.layers, shape.experts)))
