"""Sizes of the models that the bench writes itself, and their names in results."""

from dataclasses import dataclass

VERSION = 1  # to be raised when the same sizes are written differently


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a generated model. Its vocabulary is the bundled demo model's."""

    name: str
    hidden: int
    layers: int
    experts: int
    top_k: int
    width: int  # of one expert
    heads: int
    kv_heads: int
    head_dim: int = 64
    vocab: int = 4096

    @property
    def expert_bytes(self) -> int:
        """Bytes of all experts in bf16."""
        return self.layers * self.experts * 3 * self.hidden * self.width * 2


FULL = Sizes("qwen3-moe-3g", hidden=1024, layers=16, experts=64, top_k=8, width=512, heads=16, kv_heads=4)
MIDDLE = Sizes("qwen3-moe-middle", hidden=512, layers=12, experts=64, top_k=8, width=256, heads=8, kv_heads=2)
SMALL = Sizes("qwen3-moe-small", hidden=256, layers=3, experts=8, top_k=2, width=256, heads=4, kv_heads=2)
GENERATED = "generated"  # the name of a model that the bench writes itself


def is_generated(model: str) -> bool:
    """Whether a result's model, by its name, has the random weights of one of these."""
    return model == GENERATED or any(model.startswith(f"{sizes.name}-v") for sizes in (FULL, MIDDLE, SMALL))
