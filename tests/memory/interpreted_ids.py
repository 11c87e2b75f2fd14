"""`python -m tests.memory.interpret interpreted_ids:N`: N drawn cases of kernels that find experts by their ids, under
Triton's interpreter, and their formats. Raises where a bit differs from the kernels that are told addresses, or a
result from the plain reference."""

from types import SimpleNamespace

import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from core.memory.codec import FORMATS
from core.runtime.expert_math import ExpertMath
from core.runtime.grouped import GroupedMath
from tests import kernel_cases as cases

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[str, torch.dtype, bool, int, int, int, int, list[int]]:
    """Format, dtype, gpt_oss's way or not, hidden, inner, experts, experts in slots, and a token's ids."""
    name = draw(st.sampled_from(list(FORMATS)))
    unit = FORMATS[name].grain or 1
    hidden, inner = (unit * draw(st.integers(1, 2 if unit > 1 else 40)) for _ in range(2))
    experts = draw(st.integers(2, 4))
    k = draw(st.integers(1, experts))
    ids = draw(st.permutations(range(experts)))[:k]
    oss = draw(st.booleans())
    return name, draw(st.sampled_from(DTYPES)), oss, hidden, inner, experts, draw(st.integers(0, experts)), ids


def check(case: tuple[str, torch.dtype, bool, int, int, int, int, list[int]]) -> None:
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


def found(which: str) -> list[str]:
    """The formats of so many drawn cases, all of them right."""
    count = int(which)
    seen: set[str] = set()

    @seed(0)
    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(drawn())
    def examples(case: tuple[str, torch.dtype, bool, int, int, int, int, list[int]]) -> None:
        seen.add(case[0])
        check(case)

    for name in FORMATS if count > len(FORMATS) else ():
        unit = FORMATS[name].grain or 45
        check((name, torch.float32, False, unit * 3, unit, 3, 2, [2, 0]))
        seen.add(name)
    examples()
    return sorted(seen)
