"""python -m tests.sources.page > docs/formats.md: what becomes of each format that checkpoints come in."""

import gguf
import torch

from core.importing.sources.decoded import INSTEAD
from core.importing.sources.directory import NOT_READ
from core.importing.sources.gguf.blocks import EXACT, HELD
from core.importing.sources.gguf.format_choice import COARSE, FINE
from core.importing.sources.gguf.tensors import PLAIN
from core.importing.sources.torchao import NOT_READ as CLASSES
from core.memory.codec import Numbers, PartSpec, make_codec
from tests.sources.case import Case
from tests.sources.cases import CASES

TOOLS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "modelopt": "ModelOpt",
    "quark": "Quark",
    "mlx": "MLX",
    "hqq": "HQQ",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
}
KEPT = "as it is"
INTRODUCTION = """\
What becomes of the experts of a checkpoint when it is imported with the format `auto`. **As it is**: codes and scales
are the checkpoint's, bit for bit, and so is every weight in fp32. **Converted**: no format of Moestro holds such codes
(rows in another order, groups of another size, factors of inputs); they are rounded once, and the import says by how
much they are off before it begins, for each kind that the file has. Where matrices or layers are stored in several
ways, each has a format of its own. An expert is as a whole in codes or in plain numbers: FP8 beside codes is rounded to
`int8-g32`. Weights outside the experts are dequantised to the model's number type. Scales of activations and of the KV
cache are not used: neither is rounded.

Each row is a small checkpoint that the tests write, with the tool's own library where that is at hand, else in its
documented layout. compressed-tensors divides NVFP4's scales by a number; Moestro multiplies by its reciprocal, as the
kernels for such matrices do, so that a weight may differ in its last digits of fp32 from that division. HQQ's zero
points need not be whole: Moestro keeps (middle - zero) * scale in fp32, so that a weight may differ in its last digits
where that has more than 24 bits (scales of 32 bits, zeros next to 0). HQQ itself rounds each step to the model's type.
"""
GGUF = """\
**GGUF** files mix types, by layer and by matrix: a Q4_K_M has Q6_K in the down projections of half of its layers. In a
pack each matrix of each layer has a format of its own, the one that holds its type. Gate and up are one matrix: where
their types differ, it has the format that holds both (`q5_k` also holds Q4_K), or else that of most of its weights. An
expert is as a whole in codes or in plain numbers: one of its matrices in F16, BF16 or F32 beside codes is rounded to
`int8-g32`. Formats of the k-quants, the i-quants but `iq4_nl`, and `tq2_0` take inputs in blocks of 256: where a
matrix has others, Q4_K and IQ4_XS keep their codes in `int4-g32` and `iq4_nl`, with scales rounded to float16, Q5_K and
Q6_K are rounded to `int8-g32`, and the others to a format of 4 bits. A format that is chosen by name is that of all
matrices. Each layer's experts are read, copied and cached in
their own size; where layers share slots (`scope` global, `bypass`, `--blocks`) and on a GPU, a slot has room for the
largest, and so has a row of host memory where that holds some of the experts alone.

IQ1 to IQ3 store the number of a point of a grid for 4 or 8 weights at once. Moestro stores a code for each of these
weights, so that every kernel reads them as it does any other code; that takes more bytes than the file has, as does
TQ1_0, five weights of which are in a byte. Bits a weight are those of whole experts, scales with them. By type:
"""
SEVERAL = "IQ1", "IQ2", "IQ3", "TQ1"  # types that have a code for several weights
PICKLES = "they can run programs when they are opened, so that they never are. Both tools also write safetensors."
DEQUANTISED = "dequantised once, as transformers does"
ROUNDED = "converted, with the loss measured before the import"


def result(case: Case) -> str:
    """What becomes of its experts: each format with how it comes to hold them."""
    told: dict[str, list[str]] = {}
    for name in dict.fromkeys("/".join(case.held(1)).split("/")):
        if name == "checkpoint":
            how = DEQUANTISED if "FP8" in case.label else KEPT
        else:
            how = KEPT if name in (case.exact, *(case.formats or ())) else ROUNDED
        told.setdefault(how, []).append(f"`{name}`")
    return "; ".join(f"{how}: {' and '.join(names)}" for how, names in told.items())


def of_gguf(kind: str) -> str:
    if kind in PLAIN:
        return f"{KEPT}: `checkpoint`"
    if kind in EXACT and kind.startswith(SEVERAL):
        return f"every weight as it is, a code for each: `{HELD[kind]}`"
    if kind in EXACT:
        return f"{KEPT}: `{HELD[kind]}`"
    if kind in HELD:
        return f"codes as they are, scales rounded to float16: `{HELD[kind]}`"
    return f"{ROUNDED}: `{FINE.get(kind, COARSE)}`"


def widths(kind: str) -> str:
    """Bits a weight in the file, and in Moestro where the codes are kept."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    if kind not in HELD:
        return f"{8 * size / weights:.4g} | "
    specs, half = {"w": PartSpec((4, 1 << 18), torch.float16)}, torch.float16
    codec = make_codec(
        HELD[kind], specs=specs, dtype=half, device=torch.device("cpu"), stored=Numbers(half, half, half)
    )
    return f"{8 * size / weights:.4g} | {8 * codec.blob_bytes / (4 << 18):.4g}"


def kinds() -> list[str]:
    """GGUF's types that the installed package dequantises."""
    known = [one.name for one in gguf.quants._type_traits]
    return [*PLAIN, *sorted({*known} - {*PLAIN})]


def page() -> str:
    rows = dict.fromkeys(
        f"| {TOOLS[case.kind]} | {case.label}{f' ({variant(case)})' if variant(case) else ''} | {result(case)} |"
        for case in sorted(CASES, key=lambda case: [*TOOLS].index(case.kind))
        if case.name != "bnb-attention"  # whose experts are plain
    )
    return "\n".join(
        (
            "# Formats of checkpoints",
            "",
            INTRODUCTION,
            "| Tool | As | Result |",
            "| --- | --- | --- |",
            *rows,
            "",
            GGUF,
            "| Type | Result | Bits a weight in the file | in Moestro |",
            "| --- | --- | --- | --- |",
            *(f"| {kind} | {of_gguf(kind)} | {widths(kind)} |" for kind in kinds()),
            "",
            "**Not read:**",
            "",
            "| Tool | Why, and what to take instead |",
            "| --- | --- |",
            *(f"| {name} | {why} |" for name, why in NOT_READ.items()),
            *(f"| torchao's `{name}` | {why} {INSTEAD} |" for name, why in CLASSES.items()),
            f"| HQQ's or torchao's pickles (`.pt`, `.bin`) | {PICKLES} |",
            "",
            "`python -m tests.sources.page > docs/formats.md` makes this page.",
        )
    )


def variant(case: Case) -> str:
    """What a case has besides what its label says."""
    words = case.name.split("-")
    known = {
        "order": "rows in another order",
        "asym": "with zero points",
        "awq": "with factors of inputs",
        "nested": "nested scales",
        "mixed": "several widths",
        "matrices": "by matrix",
        "layers": "by layer",
        "floats": "FP8 in down projections",
        "plain": "some layers not quantized",
        "stacked": "experts stacked",
    }
    return ", ".join(text for word, text in known.items() if word in words[1:])


if __name__ == "__main__":
    print(page())
