"""A tiny GGUF model whose experts' types differ by layer and by matrix."""

from pathlib import Path

from core.importing import import_model
from tests.gguf_writer.write import make_gguf
from tests.tiny_tokenizer import save_tokenizer

WIDE = dict(
    hidden_size=256,
    moe_intermediate_size=512,
    num_hidden_layers=4,
    num_experts=8,
    num_experts_per_tok=2,
)
TYPES = {  # by layer: gate, up, down
    "blk.0.": ("Q4_K", "Q4_K", "Q6_K"),
    "blk.1.": ("Q4_K", "Q4_K", "Q4_K"),
    "blk.2.": ("Q5_K", "Q4_K", "Q8_0"),  # gate and up are one matrix
    "blk.3.": ("Q4_K", "Q4_K", "Q6_K"),
}
FORMATS = ("q4_k/q6_k", "q4_k", "q5_k/int8-g32", "q4_k/q6_k")


def mixed(name: str) -> str:
    """The type of a tensor."""
    if "_exps" not in name:
        return "F32"
    gate, up, down = next(types for prefix, types in TYPES.items() if name.startswith(prefix))
    return gate if "gate" in name else up if "up" in name else down


def make_mixed(folder: Path) -> tuple[Path, Path]:
    """(the GGUF file, its pack)."""
    _, file = make_gguf("qwen3_moe", folder, mixed, **WIDE)
    return file, save_tokenizer(import_model(str(file), folder / "pack"))
