"""`python -m tests.memory.interpret interpreted[:drawn]`: cases of the kernels under Triton's interpreter, as
{case: error}; `interpreted:N`: formats of N drawn tokens whose experts are found by their ids."""

import itertools
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.memory.codec import FORMATS
from core.runtime.expert_math import ExpertMath
from core.runtime.grouped import GroupedMath
from tests import kernel_cases as cases

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
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


@st.composite
def token_case(draw: st.DrawFn) -> tuple[str, torch.dtype, bool, int, int, int, int, list[int]]:
    """Format, dtype, gpt_oss's way or not, hidden, inner, experts, experts in slots, and a token's ids."""
    name = draw(st.sampled_from(list(FORMATS)))
    unit = FORMATS[name].grain or 1
    hidden, inner = (unit * draw(st.integers(1, 2 if unit > 1 else 40)) for _ in range(2))
    experts = draw(st.integers(2, 4))
    k = draw(st.integers(1, experts))
    ids = draw(st.permutations(range(experts)))[:k]
    oss = draw(st.booleans())
    return name, draw(st.sampled_from(DTYPES)), oss, hidden, inner, experts, draw(st.integers(0, experts)), ids


def check_ids(case: tuple[str, torch.dtype, bool, int, int, int, int, list[int]]) -> None:
    name, dtype, oss, hidden, inner, count, in_slots, ids = case
    random = torch.Generator().manual_seed(hidden * inner)
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    experts = []
    for _ in range(count):
        parts = {n: torch.randn(s[::-1] if oss else s, generator=random) * 0.1 for n, s in shapes.items()}
        if oss:
            parts |= {f"{n}_bias": torch.randn(s[0], generator=random) for n, s in shapes.items()}
        experts.append(parts)
    codec = cases.codec_of(name, experts[0], dtype, CPU, oss)
    slots, host = cases.slots_of(codec, experts), cases.slots_of(codec, experts)
    module = SimpleNamespace(has_gate=True, has_bias=oss, _apply_gate=cases.interleaved if oss else cases.gate)
    plain, fast = ExpertMath(module, codec), ExpertMath(module, codec, cases.kernels_of(codec))
    assert isinstance(fast.grouped, GroupedMath)
    table = torch.tensor([(slots if e < in_slots else host)[e].raw.data_ptr() for e in range(count)])
    x = torch.randn(1, hidden, generator=random).to(dtype)
    weights = torch.rand(1, len(ids), generator=random).to(draw_weights(dtype, hidden))
    rows = fast.grouped.by_ids(table, torch.tensor(ids), x)
    told = fast.grouped.few([slots[e] for e in ids], x)
    assert rows.equal(told), f"{case}: other bits than with addresses"
    got, same = (fast.combine(one, weights, dtype) for one in (rows, told))
    assert got.equal(same)
    want = plain.combine(plain.one_by_one([slots[e] for e in ids], x), weights, dtype)
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < 2 * cases.BOUNDS[dtype], f"{case}: {error} off the plain products"


def draw_weights(dtype: torch.dtype, hidden: int) -> torch.dtype:
    """Some models' router weights are fp32 beside 16-bit states."""
    return torch.float32 if hidden % 2 else dtype


def ids_found(count: int) -> list[str]:
    """The formats of so many drawn cases of a token whose experts are found by ids; raises where a bit differs from the
    kernels that are told addresses, or a result from the plain reference."""
    seen: set[str] = set()

    @settings(UNHURRIED, max_examples=count)
    @given(token_case())
    def examples(case: tuple[str, torch.dtype, bool, int, int, int, int, list[int]]) -> None:
        seen.add(case[0])
        check_ids(case)

    for name in FORMATS if count > len(FORMATS) else ():
        unit = FORMATS[name].grain or 45
        check_ids((name, torch.float32, False, unit * 3, unit, 3, 2, [2, 0]))
        seen.add(name)
    examples()
    return sorted(seen)


def found(which: str) -> dict[str, float] | list[str]:
    if which.isdecimal():
        return ids_found(int(which))
    return drawn_errors() if which == "drawn" else errors()
