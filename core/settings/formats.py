"""The selectable expert formats and their definitions. core.memory.codec computes with them.

A code of `bits` bits stands for (code - offset) * scale + zero, or table[code] * scale, times the scale of its row
where rows have one. In GGML's k- and i-quants scales and zeros are integers times numbers of float16 that `wide`
weights share.

Groups of int3 and int2 were chosen by measurement, on weights from Student's t with 4 degrees of freedom and 32 bits of
scale and zero a group: groups of 32, 64, 128 leave errors of .19, .23, .27 at 3 bits and .38, .43, .46 at 2. Counting
what a bit more would save (error * 2 ** bits a weight), 32 loses to 64 by 17 and 26 %, and 128 wins over 64 by 3 and 10
%. 64 was chosen: the error matters more at so few bits, and 64 divides models that 128 does not (gpt-oss: 2880 inputs).
"""

from dataclasses import dataclass

from core.errors import SettingError


@dataclass(frozen=True, slots=True)
class Format:
    """One format. `bits` of a code (16: plain numbers of the named type, 0: of the checkpoint's type), `group` = how
    many weights along the input share a scale (0: a whole row), `zero`: groups also have a zero point, `table`: the
    name in `core.memory.codec.tables` of the values of the codes ("" = evenly spaced), `scale`: the number type of
    scales, "e8m0", "e4m3" or "int8" ("" = any float). Beside scales of e4m3 each row has one of fp32; those of int8,
    and zeros beside them, are multiplied by numbers of float16, one each for every `wide` weights."""

    name: str
    bits: int
    group: int
    zero: bool
    table: str
    help: str
    source: str
    scale: str = ""
    wide: int = 0

    @property
    def has_row_scale(self) -> bool:
        """True when rows have a scale of their own, beside those of their groups."""
        return self.scale == "e4m3"

    @property
    def grain(self) -> int:
        """Weights along the input that belong together: what must divide the inputs; 0 = a whole row."""
        return max(self.group, self.wide)

    @property
    def offset(self) -> int:
        """What is taken from a code."""
        return 0 if self.bits == 8 or self.table or (self.wide and self.zero) else 1 << self.bits - 1

    def holds(self, other: "Format") -> bool:
        """Whether all codes, scales and zeros of another format are also its own."""
        alike = (self.group, self.zero, self.table, self.wide) == (other.group, other.zero, other.table, other.wide)
        return self == other or (alike and self.wide > 0 and self.bits > other.bits)

    @property
    def is_plain(self) -> bool:
        """True when weights are plain numbers, not codes."""
        return self.bits in (0, 16)

    @property
    def is_loadable(self) -> bool:
        """True when a model can be loaded in it; the others exist only in packs."""
        return self.bits != 16


_PAIRED = "torch's int4 kernels: a scale and a zero point per group (torchao tinygemm)"
_SYMMETRIC = "GGML's Q4_0: one signed scale per group (llama.cpp, ggml-quants)"
_GGML = "GGML's {} (llama.cpp, ggml-common.h)"
_K = f"{_GGML}: integers as scales, times a float16 number of 256 weights"


def _said(bits: int, group: int, zero: bool, values: str) -> str:
    scales = f"a scale{' and a zero point' if zero else ''} of 8 bits for every {group} weights"
    return ", ".join([f"{bits} bits", *([values] if values else []), scales]) + "."


_FEWER = "HQQ (Badri & Shaji 2023) for the setting; the range of each group is clipped for the least squared error"

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("checkpoint", 0, 0, False, "", "As in the checkpoint: exact.", "transformers"),
        Format("bfloat16", 16, 0, False, "", "Cast to bfloat16.", "IEEE-like 8-bit exponent (Google Brain)"),
        Format("float16", 16, 0, False, "", "Cast to float16.", "IEEE 754 half precision"),
        Format(
            "int8", 8, 0, False, "", "8 bits, a scale for every output.", "LLM.int8() (Dettmers et al. 2022), by rows"
        ),
        Format("int8-g32", 8, 32, False, "", "8 bits, a scale for every 32 weights.", "GGML's Q8_0 (llama.cpp)"),
        *(
            Format(f"int4-g{g}", 4, g, True, "", f"4 bits, a scale and a zero point for every {g} weights.", _PAIRED)
            for g in (32, 64, 128)
        ),
        *(
            Format(f"int4-g{g}-sym", 4, g, False, "", f"4 bits, a scale for every {g} weights.", _SYMMETRIC)
            for g in (32, 64, 128)
        ),
        Format(
            "nf4",
            4,
            64,
            False,
            "nf4",
            "4 bits, 16 values placed for normally distributed weights.",
            "QLoRA (Dettmers et al. 2023), section 3",
        ),
        Format(
            "mxfp4",
            4,
            32,
            False,
            "mxfp4",
            "4-bit floating point, a power of two for every 32 weights.",
            "OCP Microscaling Formats 1.0 (2023)",
            "e8m0",
        ),
        Format(
            "nvfp4",
            4,
            16,
            False,
            "mxfp4",
            "4-bit floating point, a scale of 8 bits for every 16 weights and one for each row.",
            "NVIDIA's NVFP4 (Blackwell tensor cores, TensorRT Model Optimizer)",
            "e4m3",
        ),
        Format("iq4_nl", 4, 32, False, "iq4_nl", "4 bits, 16 values denser around zero.", "GGML's IQ4_NL (llama.cpp)"),
        *(
            Format(name, bits, group, zero, table, _said(bits, group, zero, values), _K.format(of), "int8", 256)
            for name, bits, group, zero, table, values, of in (
                ("q6_k", 6, 16, False, "", "", "Q6_K"),
                ("q5_k", 5, 32, True, "", "", "Q5_K"),
                ("q4_k", 4, 32, True, "", "", "Q4_K"),
                ("iq4_xs", 4, 32, False, "iq4_nl", "16 values denser around zero", "IQ4_XS"),
                ("iq3_s", 4, 32, False, "iq3_s", "16 values", "IQ3_S, a code for each weight"),
                ("iq3_xxs", 4, 32, False, "iq3_xxs", "16 values", "IQ3_XXS, a code for each weight"),
                ("q3_k", 3, 16, False, "", "", "Q3_K"),
                ("iq2_s", 3, 16, False, "iq2", "8 values", "IQ2_S and IQ2_XS, a code for each weight"),
                ("iq2_xxs", 3, 32, False, "iq2", "8 values", "IQ2_XXS, a code for each weight"),
                ("iq1_m", 3, 16, False, "iq1_m", "8 values", "IQ1_M, a code for each weight"),
                ("iq1_s", 2, 32, False, "iq1_s", "4 values", "IQ1_S, a code for each weight"),
                ("q2_k", 2, 16, True, "", "", "Q2_K"),
            )
        ),
        Format("tq2_0", 2, 256, False, "", "2 bits, a scale for every 256 weights.", _GGML.format("TQ2_0 and TQ1_0")),
        Format("int3", 3, 64, True, "", "3 bits, a scale and a zero point for every 64 weights.", _FEWER),
        Format("int2", 2, 64, True, "", "2 bits, a scale and a zero point for every 64 weights.", _FEWER),
    )
}
LOADABLE = tuple(name for name, one in FORMATS.items() if one.is_loadable)
DENSE = tuple(n for n in LOADABLE if n == "checkpoint" or (FORMATS[n].bits > 3 and not FORMATS[n].wide))


def format_of(name: str) -> Format:
    """Look a format up. Raises SettingError that lists the names."""
    if name not in FORMATS:
        raise SettingError(f"There is no expert format {name!r}. Choose one of: {', '.join(FORMATS)}.")
    return FORMATS[name]
