"""Blocks of ggml's quantisation types: real ones where gguf can make them, else random ones that are valid."""

import gguf
import numpy as np


def blocks(weights: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Weights in a type: by gguf where it can; else valid random blocks with small scales, of the right size."""
    try:
        return gguf.quants.quantize(weights, kind)
    except NotImplementedError:
        size, _ = gguf.GGML_QUANT_SIZES[kind]
        rows = weights.reshape(-1, weights.shape[-1])
        return random_blocks(kind, rows.shape[0] * rows.shape[1] // size).reshape(*weights.shape[:-1], -1)


HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q5_0": (0,),
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "IQ3_S": (0,),
    "IQ3_XXS": (0,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ2_S": (0,),
    "IQ1_S": (0,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
"""Where blocks hold float16 numbers (ggml-common.h); every other byte may be anything."""


def random_blocks(kind: gguf.GGMLQuantizationType, count: int, seed: int = 0) -> np.ndarray:
    """uint8 [count, bytes of a block] that dequantise to small finite weights."""
    rng = np.random.default_rng(seed)
    made = rng.integers(0, 256, (count, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
    if kind.name == "MXFP4":
        made[:, 0] = rng.integers(118, 124, count)
    if kind.name == "NVFP4":
        made[:, :4] = rng.integers(0, 256, (count, 4)) % 255
    if kind.name == "IQ1_M":  # the sign and the highest bits of its float16's exponent
        made[:, 55] = made[:, 55] & 0x8F | 0x10
    if kind.name == "TQ2_0":
        made ^= made >> 1 & made & 0x55  # of the codes 0 to 3, no 3
    for at in HALVES.get(kind.name, ()):
        made[:, at : at + 2] = (rng.standard_normal((count, 1)) * 1e-3).astype(np.float16).view(np.uint8)
    return made
