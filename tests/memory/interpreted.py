"""`python -m tests.memory.interpret interpreted[:drawn]`: cases of the kernels under Triton's interpreter, as
{case: error}."""

import itertools
import tempfile
from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests import kernel_cases as cases

CPU = torch.device("cpu")
UNHURRIED = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
EXPERTS = [
    ("int4-g32", torch.float32, False),
    ("mxfp4", torch.float32, True),
    ("int8", torch.float16, False),
    ("checkpoint", torch.float32, True),
    ("int3", torch.bfloat16, False),
]


DRAWN = ("checkpoint", *cases.FEW)


def drawn_errors(examples: int = 2) -> dict[str, float]:
    """As `errors`, of drawn shapes, number types and orders of DRAWN: products, and matrices dequantized."""
    found: dict[str, float] = {}
    for name in DRAWN:
        _draw(name, examples, found)
    return found


def _draw(name: str, examples: int, found: dict[str, float]) -> None:
    group = cases.FORMATS[name].grain or 1

    @settings(UNHURRIED, max_examples=examples)
    @given(
        dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
        transposed=st.booleans(),
        bias=st.booleans(),
        outputs=st.integers(1, 9),
        groups=st.integers(1, max(2, 160 // group)),
        count=st.integers(1, 2),
    )
    def product(dtype: torch.dtype, transposed: bool, bias: bool, outputs: int, groups: int, count: int) -> None:
        inputs = groups * group
        case = f"{name} {outputs} x {inputs} x {count} {dtype} transposed={transposed} bias={bias}"
        found[case] = cases.product_error(name, dtype, CPU, transposed, bias, outputs, inputs, count)
        if name in cases.CODED:
            found[f"{case} dequantized"] = cases.dequantization_error(
                name, dtype, CPU, transposed, outputs, inputs, min(count, 3)
            )

    product()


def errors() -> dict[str, float]:
    """Each case's error as a share of its bound."""
    found: dict[str, float] = {}
    for (i, name), transposed in itertools.product(enumerate(cases.FORMATS), (False, True)):
        bias = transposed ^ bool(i % 2)  # each format both ways and with and without; all four over the formats
        found[f"{name} transposed={transposed} bias={bias}"] = cases.product_error(
            name, torch.float32, CPU, transposed, bias
        )
    for name in cases.FORMATS:
        found[f"{name} long"] = cases.product_error(
            name, torch.float32, CPU, False, True, 11, cases.odd_inputs(name, long=True)
        )
    for name in ("checkpoint", "int8-g32", "int4-g64", "mxfp4"):
        for dtype in (torch.float16, torch.bfloat16):
            found[f"{name} {dtype}"] = cases.product_error(name, dtype, CPU, transposed=False, bias=True)
    found["19 slots"] = cases.product_error("int4-g32-sym", torch.float32, CPU, False, True, 5, 64, 19)
    for i, name in enumerate(cases.CODED):
        found[f"{name} dequantized"] = cases.dequantization_error(name, torch.float32, CPU, transposed=bool(i % 2))
    found["int4-g32 dequantized to bf16"] = cases.dequantization_error(
        "int4-g32", torch.bfloat16, CPU, transposed=False
    )
    for name, dtype, oss in EXPERTS:
        for what, error in cases.expert_error(name, dtype, CPU, oss).items():
            found[f"expert {name} {dtype} oss={oss} {what}"] = error
    found["engine"] = engine_error() / 1e-5
    return found


def engine_error() -> float:
    """Of a tiny model's logits, with misses, in fp32."""
    from core.engine import Engine
    from core.settings.config import Settings
    from core.settings.loading import LoadSpec
    from tests.checkpoints import make_checkpoint
    from tests.loaded import unloading
    from tests.tiny_tokenizer import save_tokenizer

    with tempfile.TemporaryDirectory() as directory:
        path = save_tokenizer(
            make_checkpoint(
                "qwen3_moe", Path(directory), num_hidden_layers=2, num_experts_per_tok=2, moe_intermediate_size=32
            )
        )
        chosen = Settings({"budget": "62.5%"})
        with unloading(
            Engine.load(LoadSpec.checked(str(path), chosen, format="int4-g32", dtype="float32", context=64, threads=1))
        ) as engine:
            return cases.engine_error(engine, prompt=2)


def found(which: str) -> dict[str, float]:
    """The errors of `drawn` cases, or of all that are listed."""
    return drawn_errors() if which == "drawn" else errors()
