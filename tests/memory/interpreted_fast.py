"""`python -m tests.memory.interpret interpreted_fast[:all]`: the canonical product in Triton against that in torch, and
whole experts against those on this CPU, as {case: how many numbers differ}."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.memory.codec import Numbers, PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.fast.gpu.launch import GpuProducts, Groups
from core.memory.codec.matrix import Matrix, Part, matrix
from core.runtime.program.combine import FIELDS, Combine
from core.runtime.program.combine import kernel as combine_kernel
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.gate import Gate
from core.runtime.program.gpu.experts import GpuExperts, Where
from core.runtime.program.row_steps import RowSteps
from core.system.native.compile import supported
from tests.kernel_cases import CODED, gate, interleaved
from tests.memory.fast import product_oracle
from tests.memory.fast.cases import GATES, PLAIN, case, inputs_of, rows

UNHURRIED = settings(derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SOME = ("int4-g64", "bfloat16")  # pairs of codes, and none; three bits are among what is drawn
APART = ("nvfp4", "q3_k", "q5_k", "q6_k", "iq2_s")  # scales apart from those of groups, bits from others, a table
ODD = (float("nan"), float("inf"), -0.0, 1e-45, 3e38)
EXPERTS: dict[str, dict[str, Any]] = {
    "int4-g32": {},
    "mxfp4": {"oss": True, "chosen": 3},
    "checkpoint": {"oss": True},
    "int8": {"chosen": 1, "dtype": torch.float32},
    "int3": {"inner": 64, "dtype": torch.float16},
}


def differing(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Numbers that are not equal; NaN is equal to NaN."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    return int((~((got == wanted) | (got.isnan() & wanted.isnan()))).sum())


def found(which: str) -> dict[str, int]:
    differ: dict[str, int] = {}
    whole = which == "all"
    for i, name in enumerate(SOME):  # a step of blocks, and a part of one; more rows of x than a program has at once
        products(name, 7, 9, [1, 5], DTYPES[i], DTYPES[i], differ)
    for name in APART:
        products(name, 3, 1, [1], torch.float32, torch.float32, differ)
    for name in (*CODED, *PLAIN) if whole else ():
        draw(name, 6, differ)
    if whole:  # more rows than a tile has, of both
        products("int4-g32", 70, 9, [33, 2], torch.bfloat16, torch.float32, differ)
    odd_numbers(differ, ("int4-g64", "mxfp4", "int8", "float32") if whole else ("int8-g32",))
    turned(differ)
    rounded_once(differ)
    for name, how in EXPERTS.items() if whole else (("int4-g32", {"hidden": 32, "chosen": 1}),):
        differ |= {f"expert {name} {what}": count for what, count in expert(name, **how).items()}
    for name in GATES:
        differ[f"gate {name}"] = activation(GATES[name])
    for shared in ("", "plain", "gated"):
        differ[f"combine {shared}"] = summed(shared)
    return differ


def draw(name: str, examples: int, differ: dict[str, int]) -> None:
    @settings(UNHURRIED, max_examples=examples)
    @given(
        outputs=st.integers(1, 17),
        blocks=st.integers(1, 19),
        counts=st.lists(st.integers(1, 6), min_size=1, max_size=2),
        dtype=st.sampled_from(DTYPES),
        out=st.sampled_from(DTYPES),
    )
    def product(outputs: int, blocks: int, counts: list[int], dtype: torch.dtype, out: torch.dtype) -> None:
        products(name, outputs, blocks, counts, dtype, out, differ)

    product()


def products(
    name: str,
    outputs: int,
    blocks: int,
    counts: list[int],
    dtype: torch.dtype,
    out: torch.dtype,
    differ: dict[str, int],
) -> None:
    """A row of x for each of as many slots as there are `counts`, and so many rows for each in one launch."""
    one, slots, _ = case(name, outputs, inputs_of(name, blocks), len(counts))
    products, x = GpuProducts(one), rows(sum(counts), one.inputs, dtype)
    label = f"{name} {outputs} x {one.inputs} {counts} {dtype} {out}"
    each = [product_oracle.product(one, slot, x[i : i + 1]) for i, slot in enumerate(slots)]
    differ[label] = differing(products.few([*slots], x[: len(counts)], out), torch.cat(each).to(out))
    index = torch.arange(len(x)).flip(0)
    ends = torch.tensor([0, *counts]).cumsum(0)
    groups = Groups(torch.tensor([slot.data_ptr() for slot in slots]), torch.arange(len(counts)), ends.int(), index)
    parts = zip(slots, x[index].split(counts), strict=True)
    wanted = torch.cat([product_oracle.product(one, slot, some) for slot, some in parts]).to(out)
    differ[f"{label} several"] = differing(products.several(groups, x, out), wanted)
    if one.bits:
        differ[f"{label} tiled"] = differing(products.several(groups, x, out, tiled=True), wanted)


def odd_numbers(differ: dict[str, int], formats: tuple[str, ...]) -> None:
    for name in formats:
        one, slots, _ = case(name, 5, inputs_of(name, 3))
        x = rows(2 * len(ODD) + 1, one.inputs, torch.float32)
        for i, value in enumerate(ODD):
            x[i, 3], x[len(ODD) + i] = value, value
        x[-1] = torch.arange(one.inputs) % 32 - 15.5  # half way between two integers, as the scale is 1
        x[-1, ::32] = 127.0
        products = GpuProducts(one)
        got = torch.cat([products.few([slots[0]], row[None]) for row in x])
        wanted = product_oracle.product(one, slots[0], x)
        differ[f"{name} odd"] = differing(got, wanted)
        if one.bits:
            ends = torch.tensor([0, len(x)], dtype=torch.int32)
            groups = Groups(torch.tensor([slots[0].data_ptr()]), torch.zeros(1).long(), ends, torch.arange(len(x)))
            differ[f"{name} odd, tiled"] = differing(products.several(groups, x, tiled=True), wanted)


def turned(differ: dict[str, int]) -> None:
    weights = torch.randn(7, 76, generator=torch.Generator().manual_seed(1)).half()
    slot = weights.t().contiguous().view(-1).view(torch.uint8)
    one = Matrix(7, 76, True, 0, 0, "", Part(0, torch.float16), None, None, None, None)
    x = rows(2, 76, torch.float32)
    got = torch.cat([GpuProducts(one).few([slot], row[None]) for row in x])
    differ["turned"] = differing(got, product_oracle.product(one, slot, x))


def rounded_once(differ: dict[str, int]) -> None:
    """An fma whose sum, rounded to fp64 first, would be another number of fp32: see `test_fma_rounds_once`."""
    for small, wanted in ((2.0**-80, 1 + 2**-11 + 2**-23), (-(2.0**-80), 1 + 2**-11)):
        weights = torch.zeros(1, 16)
        weights[0, 0], weights[0, 8] = small, 1.0 + 2**-12
        x = torch.zeros(1, 16)
        x[0, 0], x[0, 8] = 1.0, 1.0 + 2**-12
        one = Matrix(1, 16, False, 0, 0, "", Part(0, torch.float32), None, None, None, None)
        got = GpuProducts(one).few([weights.view(-1).view(torch.uint8)], x)
        differ[f"rounded once {small}"] = differing(got, torch.tensor([[wanted]], dtype=torch.float32))


def expert(
    name: str,
    *,
    oss: bool = False,
    chosen: int = 2,
    hidden: int = 64,
    inner: int = 32,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, int]:
    """Of two tokens through three experts: each by itself, by addresses and by ids, and both at once. `oss` = biases,
    an interleaved gate, and plain weights transposed."""
    is_transposed = oss and name == "checkpoint"
    shapes = {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    specs = {n: PartSpec(s[::-1] if is_transposed else s, dtype) for n, s in shapes.items()}
    if oss:
        specs |= {f"{n}_bias": PartSpec(s[:1], dtype) for n, s in shapes.items()}
    stored = Numbers(dtype, torch.float16, torch.bfloat16)
    cpu = torch.device("cpu")
    codec = make_codec(name, specs=specs, dtype=dtype, device=cpu, is_transposed=is_transposed, stored=stored)
    assert isinstance(codec, Base)
    random, tokens = torch.Generator().manual_seed(1), 2
    slots = torch.zeros(3, -(-codec.slot_bytes // 64) * 64, dtype=torch.uint8)
    for slot in slots:
        parts = {n: (torch.randn(s.shape, generator=random) * 0.1).to(dtype) for n, s in specs.items()}
        codec.place(codec.encode(parts), slot)
    bounds = {"limit": 7.0, "alpha": 1.702}
    module = SimpleNamespace(has_gate=True, has_bias=oss, _apply_gate=interleaved if oss else gate, **bounds)
    on_cpu = ExpertKernels(module, codec)
    x = torch.randn(tokens, hidden, generator=random).to(dtype)
    ids = torch.stack([torch.randperm(3, generator=random)[:chosen] for _ in range(tokens)])
    weights = torch.rand(tokens, chosen, generator=random)
    wanted = []
    for t in range(tokens):
        token = RowSteps(on_cpu, 1, chosen)
        token.x.copy_(x[t : t + 1])
        token.weights.copy_(weights[t : t + 1])
        token.whole.run([slots[e].data_ptr() for e in ids[t]])
        wanted.append(token.total.to(dtype, copy=True))
    experts = GpuExperts(matrix(codec, "gate_up_proj"), matrix(codec, "down_proj"), on_cpu.gate)
    table = torch.tensor([slot.data_ptr() for slot in slots])
    first = x[:1], weights[0]
    differ = {
        "addresses": differing(experts.token(Where(tuple(table[ids[0]].tolist())), *first), wanted[0]),
        "ids": differing(experts.token(Where(table=table, ids=ids[0].contiguous()), *first), wanted[0]),
    }
    order, pairs = ids.flatten().argsort(stable=True), torch.empty(tokens * chosen, dtype=torch.int64)
    pairs[order] = torch.arange(len(pairs))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), torch.bincount(ids.flatten(), minlength=3).cumsum(0)])
    groups = Groups(table, torch.arange(3), ends.int(), order // chosen)
    for what, tiled in {"tokens": False, "tokens, tiled": True}.items():
        got = experts.tokens(groups, x, pairs.view(tokens, chosen), weights, tiled)
        differ[what] = differing(got, torch.cat(wanted))
    return differ


def activation(spec: Gate) -> int:
    from core.runtime.program import gate as on_cpu
    from core.runtime.program.gpu.gate import gated

    width = 96
    random = torch.Generator().manual_seed(3)
    y = torch.randn(2 * width, generator=random) * torch.logspace(-3, 2.2, 2 * width)
    y[:8] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), -150.0, 89.5, -103.97])
    one = Matrix(2 * width, 1, False, 0, 0, "", Part(0, torch.float32), None, None, None, None)
    got = GpuProducts(one, join=gated, spec=spec).few([y.view(torch.uint8)], torch.ones(1, 1))
    found = replace(spec, width=width)
    return differing(got[0], run_on_cpu(on_cpu.kernel(found), on_cpu.FIELDS, found.units, {"x": y}, width))


def summed(shared: str) -> int:
    from core.runtime.program.gpu.combine import combine

    width, random = 40, torch.Generator().manual_seed(4)
    given = {
        "experts": torch.randn(6, width, generator=random),
        "pairs": torch.tensor([[0, 3], [-1, 5], [-1, -1]]),
        "weights": torch.rand(3, 2, generator=random),
        "shared": torch.randn(3, width, generator=random),
        "shared_gate": torch.randn(3, generator=random),
    }
    wanted = run_on_cpu(combine_kernel(Combine(width, 2, shared)), FIELDS, 3, given, 3 * width)  # type: ignore[arg-type]
    out = torch.empty(3, width)
    more = given["shared"] if shared else None, given["shared_gate"] if shared == "gated" else None
    arguments = given["experts"], given["pairs"], given["weights"], *more, out
    combine[2, 3](*arguments, CHOSEN=2, WIDTH=width, BLOCK=32, num_warps=1, enable_fp_fusion=False)
    return differing(out, wanted.view(3, width))


def run_on_cpu(
    kernel: int, fields: tuple[str, ...], units: int, given: dict[str, torch.Tensor], count: int
) -> torch.Tensor:
    """fp32 numbers that a kernel of core.runtime.program writes to `out`."""
    from core.memory.codec.fast.steps import named, single

    assert supported()
    out = torch.empty(count)
    single(kernel, named(fields, **{name: one.data_ptr() for name, one in given.items()}, out=out.data_ptr()), units)
    return out
