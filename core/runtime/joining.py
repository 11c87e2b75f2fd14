"""Whether the host computes missing experts within tokens that the GPU leads, and what it takes for that."""

import os
from collections.abc import Sequence

import torch

from core.cache.expert_cache import ExpertCache
from core.memory.codec.fast.background import Background
from core.memory.store import ExpertStore
from core.runtime.expert_math import ExpertMath
from core.runtime.host_compute import HostCompute
from core.runtime.host_join import HostJoin
from core.runtime.program.gpu.rows import GpuMath

WINDOWS = os.name == "nt"  # its driver holds launches back, and ends a kernel that runs for 2 seconds


class Joining:
    """Of one model, on the computing thread. `failed`: why it cannot be with this load, once that was tried."""

    def __init__(
        self, host: HostCompute | None, math: Sequence[ExpertMath], expert_cache: ExpertCache, store: ExpertStore
    ) -> None:
        self._host, self._math, self._expert_cache, self._store = host, math[0], expert_cache, store
        self.failed = ""

    def objection(self, decode: str) -> str:
        """Why tokens led like this (gpu_decode) cannot have missing experts computed by the host, where that is chosen;
        "" where they can, or it is not."""
        host = self._host
        if host is None or not host.active:
            return ""
        why = self.failed
        if host.settings.placement != "host":
            why = "how many of them is decided layer by layer"
        elif not isinstance(self._math, GpuMath):
            why = "the host's arithmetic is not the GPU's"
        elif torch.version.hip is not None:
            why = "an AMD GPU's kernels and the host cannot tell each other what they have written"
        elif len({*host.kernels}) > 1:
            why = "the layers' experts have several formats"
        elif host.team is None:
            why = "the host has no threads of its own for it (host_threads)"
        elif not self._store.lends_all:
            why = "not every expert is there"
        elif WINDOWS and decode == "auto":
            why = "on Windows a kernel waits for the host only where gpu_decode is chosen by name"
        return f"missing experts are computed in host memory (miss_placement), and {why}" if why else ""

    def team(self, decode: str) -> Background | None:
        """The threads that compute them; None where the GPU reads them over the link, or the host leads."""
        host = self._host
        return host.team if host is not None and host.active and not self.objection(decode) else None

    @property
    def helps(self) -> bool:
        """Whether tokens could be led by the GPU with this, where it cannot read every expert by itself."""
        return isinstance(self._math, GpuMath) and self._store.lends_all and torch.version.hip is None

    def make(self, chosen: int) -> HostJoin:
        """For tokens whose routers choose so many experts; where there is a `team`. Raises DeviceError."""
        host, cache = self._host, self._expert_cache
        assert host is not None and host.kernels and host.team is not None
        device = self._math.codec.device
        join = HostJoin(host.kernels[0], host.team, self._store, cache.layers * cache.experts, chosen, device)

        def lost(why: str) -> None:
            if join.stuck:
                host.lose(why, join)
            else:
                host.close()
                host.fail(why)

        join.lose = lost
        return join
