"""What copying, computing on the device and computing on the host take: measured once, then followed by what passes
measure. `core.policy.placement` decides by these."""

import logging

from core.policy.placement import Costs, Layer, in_place, layer_s, to_host

log = logging.getLogger("moestro.host")

FOLLOW = 0.05  # weight of what the last layer took
OUTLIER = 3.0  # times what is usual: of a longer time so much counts
LEAST_S = 1e-7
PROBED = 200  # layers with missing experts
WEIGHED = 48  # ... of which the host computed some


class PlacementCosts:
    """Kept up to date by the computing thread."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self._idle = costs, 0  # layers since the host computed something
        self._saved_s = 0.0
        self._weighed, self._alone_s = 0, 0.0  # layers, and what the computing thread alone would have saved in them
        ms = (1e3 * one for one in (costs.copy_s, costs.device_s, costs.host_s))
        log.info("A missing expert: %.3g ms to copy it, %.3g ms to compute it on the device, %.3g ms on the host.", *ms)

    @property
    def alike(self) -> bool:
        """Whether the computing threads compute missing experts as they do residents, so that none has to wait."""
        return not self.costs.threads and not self.costs.gpu

    def choose(self, layer: Layer, copy_s: float, *, weigh: bool = False) -> int:
        """How many of a layer's missing experts the host computes. `copy_s`: of one expert now, 0 = not known. One, now
        and then, where it is to compute none: what it takes is not known otherwise. `weigh`: what it saves counts."""
        if copy_s and copy_s != self.costs.copy_s:
            self.costs.copy_s = copy_s
        found = layer.misses if self.alike else to_host(self.costs, layer)
        if weigh and found:
            self._saved_s += layer_s(self.costs, layer, 0) - layer_s(self.costs, layer, found)
        if found and self.costs.threads and not self.costs.gpu:
            alone_s = self.costs.device_fixed_s + (layer.residents + layer.misses) * self.costs.device_s
            self._alone_s += layer_s(self.costs, layer, found) - alone_s
            self._weighed += 1
        self._idle = 0 if found else self._idle + 1
        if self._idle == PROBED:
            self._idle = 0
            return 1
        return found

    def alone(self) -> bool:
        """Whether the computing thread has turned out to compute missing experts in no more time by itself, and now
        does: what threads of the host save is less than handing over to them takes."""
        if self._weighed < WEIGHED:
            return False
        saved_s, self._weighed, self._alone_s = self._alone_s, 0, 0.0
        if saved_s < 0:
            return False
        self.costs = in_place(self.costs)
        return True

    def hidden(self, experts: int, copy_s: float) -> int:
        """How many copies end while so many experts are computed, of one row each; of more rows they take longer."""
        each_s = copy_s or self.costs.copy_s
        return int(experts * self.costs.device_s / each_s) if each_s else experts

    def saved_ms(self) -> float:
        """Milliseconds that the choices that were weighed since the last call have saved, by these costs, beside
        waiting for every copy."""
        saved_s, self._saved_s = self._saved_s, 0.0
        return 1e3 * saved_s

    def computed(self, seconds: float, experts: int, *, beside: bool) -> None:
        """The device computed so many experts, while the host's threads did or not."""
        fixed_s = self.costs.device_fixed_s
        self._follow("device_beside_s" if beside else "device_s", (seconds - fixed_s) / experts)
        if not beside and not self.costs.threads and not self.costs.gpu:
            self.costs.host_s = self.costs.device_s

    def hosted(self, seconds: float, experts: int) -> None:
        """Threads of the host computed so many experts by themselves."""
        self._follow("host_s", seconds / experts)

    def handed(self, seconds: float) -> None:
        """Handing a layer's experts over to them, and taking the outputs, took so long."""
        self._follow("host_fixed_s", seconds)

    def _follow(self, name: str, found_s: float) -> None:
        before_s: float = getattr(self.costs, name)
        setattr(self.costs, name, before_s + FOLLOW * (min(max(found_s, LEAST_S), OUTLIER * before_s) - before_s))
