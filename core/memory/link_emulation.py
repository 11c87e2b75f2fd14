"""Gives the copies the pace of the link that the settings ask for."""

from core.memory.link import Pace, scaled_gbps
from core.memory.transfer import TransferEngine
from core.settings.link import LinkSettings


class LinkEmulation:
    """Paces the copies of `transfers`, of `blob_bytes` each. `layer_ms`: compute time of a layer that the link "auto"
    is scaled to, for the demo model, whose experts are too small for any real link to be felt (kept by
    `core.engine.kept_pace`); 0: "auto" is the machine's own link. It is set before the first `configure`."""

    def __init__(self, transfers: TransferEngine, blob_bytes: int) -> None:
        self._transfers, self._blob_bytes, self.layer_ms = transfers, blob_bytes, 0.0

    def configure(self, old: LinkSettings | None, new: LinkSettings) -> None:
        """Use another link from the next copy on."""
        if new == old:
            return
        gbps = new.gbps if new.kind == "emulated" else 0.0
        if new.kind == "auto" and self.layer_ms:
            gbps = scaled_gbps(self.layer_ms, self._blob_bytes, new.latency_us)
        pace = self._transfers.pace
        if (pace.gbps, pace.latency_us) != (gbps, new.latency_us):
            self._transfers.pace = Pace(gbps, new.latency_us)
