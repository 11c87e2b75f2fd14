"""The real engine for the dashboard's tests, made watchable: no faster than a reader, at an end only when told."""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import torch

from app.services.host import Host
from core.capacity import plan
from core.engine import Engine
from core.engine.sampler import Draw, Sampler
from core.settings.sampling import Sampling
from core.types import Asked, Begun, Chat, Ids, Piece
from tests.browser.lengths import ENDLESS, with_length

PACE_S, LATER_S = 0.02, 1.0
QUICK = 200  # tokens at the first pace; then the context, which is an end that cannot be put off, is left for later


class PacedEngine(Engine):
    """Waits a little after each token, and never draws an end of the answer."""

    def generate(
        self,
        messages: Asked,
        sampling: Sampling | None = None,
        cancel: threading.Event | None = None,
        draw: Draw | None = None,
        *,
        reuse: bool = False,
        reading: Callable[[Piece], None] | None = None,
    ) -> Iterator[Piece]:
        sampling, cancel, n = sampling or Sampling(), cancel or threading.Event(), 0
        asked = messages.asked if isinstance(messages, Begun) else messages
        if not isinstance(asked, Ids | Chat):
            sampling = with_length(asked, sampling)
        pieces = super().generate(
            messages, sampling, cancel, draw or self._endless(sampling), reuse=reuse, reading=reading
        )
        with closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                if piece.kind == "token":
                    n += 1
                    cancel.wait(PACE_S if n < QUICK else LATER_S)
                yield piece

    def _endless(self, sampling: Sampling) -> Draw:
        sampler, ends = Sampler(sampling, self.device), sorted(self.prompt.ends)

        def draw(ids: Sequence[int], logits: torch.Tensor) -> int:
            logits = logits.clone()
            logits[:, ends] = -torch.inf
            return sampler(ids, logits)

        return draw


def real_host() -> Host:
    """A host whose demo model is the bundled one, or that of MOESTRO_TEST_MODEL."""
    if folder := os.environ.get("MOESTRO_TEST_MODEL"):
        plan.DEMO = Path(folder)
    host = Host(engine=PacedEngine)  # type: ignore[arg-type]
    host.chats.set_sampling(temperature=2.0, max_new_tokens=ENDLESS)
    return host
