"""What stands beside a speed, so that speeds are compared at equal quality: the file that is computed, its bits a
weight, and how far its answers are from those of transformers in bf16."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from bench.harness.engines import random_tokens
from bench.models.peers import Peer
from bench.speed.plain import Plain
from core.engine import Engine
from core.engine.distance import divergence, read
from core.system.wording import cell

TEXT = 48  # tokens
NOTE = "bits: of a weight; KL: to transformers in bf16, nats a token"
About = dict[str, Any]  # file, bits, kl


class Fidelity:
    """Of one model. `plain` has it in bf16."""

    def __init__(self, model: Path, plain: Plain) -> None:
        self._bytes = sum(file.stat().st_size for file in model.rglob("*.safetensors"))
        self._text = random_tokens(TEXT, 0)
        self._base = _log_probabilities(plain.logits(self._text))

    def of_engine(self, engine: Engine, file: str) -> About:
        """`file` names the format of its experts."""
        with torch.inference_mode():
            logits = read(engine.wiring.measuring, engine.wiring.kv, self._text, engine.wiring.loaded.sizes.chunk)
        size = engine.sizes.dense + engine.sizes.blob * engine.shape.total
        return self._about(file, size, _log_probabilities(logits.tolist()))

    def of_peer(self, peer: Peer) -> About:
        """Read by the program itself, in its usual configuration."""
        with peer.opened(mmap=True) as session:
            found = session.ask(text=self._text)["log_probabilities"]
        told = [at for at, one in enumerate(found) if one]
        known = torch.tensor([found[at] for at in told], dtype=torch.float64)
        return self._about(peer.kind, peer.file.stat().st_size, known, told)

    def _about(self, file: str, size: int, found: torch.Tensor, told: Sequence[int] = range(TEXT)) -> About:
        """The checkpoint's files have 16 bits a weight. `told`: the tokens that `found` is of."""
        kl = fmean(divergence(self._base[list(told)], found).tolist())
        return {"file": file, "bits": 16 * size / self._bytes, "kl": kl, "kl_tokens": len(told)}


def shown(about: About) -> tuple[str, str, str]:
    """Cells of a table."""
    return about["file"], cell(about["bits"]), cell(about["kl"], ".2g")


HEADS = "file", "bits", "KL"


def _log_probabilities(logits: Any) -> torch.Tensor:
    """[T, V] in float64."""
    return torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
