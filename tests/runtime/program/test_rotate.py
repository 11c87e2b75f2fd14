"""Norms of heads, rotary embedding and the KV write."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program import rotate
from core.runtime.program.rms import Norm
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same

pytestmark = needs_kernels
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    rotate.Rotate(4, 2, 16, 16, BF16, Norm(16, 1e-6, BF16)),
    rotate.Rotate(4, 2, 16, 16, FP32, interleaved=True),
    rotate.Rotate(6, 2, 40, 20, FP16, Norm(40, 1e-5, FP32, offset=True), BF16),
    rotate.Rotate(3, 3, 44, 28, BF16, Norm(44, 1e-6), FP32, interleaved=True),
    rotate.Rotate(8, 1, 64, 0, FP32),
    rotate.Rotate(2, 1, 12, 12, FP32, bias=FP16),
    rotate.Rotate(4, 2, 20, 16, BF16, Norm(20, 1e-6, BF16), norm_last=True, value_norm=Norm(20, 1e-6)),
    rotate.Rotate(4, 2, 16, 8, BF16, Norm(16, 1e-6, BF16, offset=True), gated=True),
    rotate.Rotate(6, 1, 12, 12, FP32, bias=FP16, gated=True),
]


class Rows:
    """Drawn rows of a case, and where their results go."""

    def __init__(self, spec: rotate.Rotate, rows: int, seed: int, *, wild: bool = False) -> None:
        self.spec, self.rows, heads = spec, rows, spec.keys + 2 * spec.heads
        self.qkv = drawn(seed, rows, heads * spec.width, wild=wild)
        self.bias = drawn(seed + 1, heads * spec.width).to(spec.bias or FP32)
        stored = (spec.norm.weight if spec.norm else None) or FP32
        self.weights = [drawn(seed + 2 + i, spec.width).to(stored) for i in range(2)]
        angles = drawn(seed + 4, rows, spec.rotated // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        capacity = 12
        self.positions = torch.randperm(capacity, generator=torch.Generator().manual_seed(seed))[:rows]
        self.q = torch.full((rows, spec.query_heads, spec.width), 9.0)
        self.k = torch.full((spec.heads, capacity, spec.width), 9.0).to(spec.cache)
        self.v = torch.full((capacity, spec.heads, spec.width), 9.0).to(spec.cache)  # another order than keys have

    def compute(self, splits: list[int], only: slice = slice(None)) -> None:
        size = self.spec.width * self.spec.cache.itemsize
        call(
            rotate.kernel(self.spec),
            rotate.FIELDS,
            len(self.positions[only]) * self.spec.heads,
            splits,
            qkv=self.qkv[only],
            bias=self.bias,
            q_weight=self.weights[0],
            k_weight=self.weights[1],
            cos=self.cos[only],
            sin=self.sin[only],
            positions=self.positions[only],
            q=self.q[only],
            k=self.k,
            v=self.v,
            k_head_stride=self.k.shape[-2] * size,
            k_row_stride=size,
            v_head_stride=size,
            v_row_stride=self.spec.heads * size,
        )


@pytest.mark.parametrize("spec", CASES, ids=str)
@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 5),
    splits=st.lists(st.integers(0, 20), max_size=3),
    wild=st.booleans(),
)
def test_rows(spec: rotate.Rotate, seed: int, rows: int, splits: list[int], wild: bool) -> None:
    case = Rows(spec, rows, seed, wild=wild)
    case.compute(splits)
    product = case.qkv + case.bias.float() if spec.bias else case.qkv
    heads = product.view(rows, -1, spec.width).numpy()
    parts = [heads[:, : spec.keys : 1 + spec.gated], heads[:, spec.keys : -spec.heads], heads[:, -spec.heads :]]
    for i, weight in enumerate(case.weights):
        if spec.norm_last:
            parts[i] = oracle.turned(parts[i], case.cos.numpy(), case.sin.numpy(), spec.interleaved)
        if spec.norm:
            weights = weight.float().numpy() if spec.norm.weight else None
            parts[i] = oracle.rms(parts[i], weights, spec.norm.eps, spec.norm.offset)
        if not spec.norm_last:
            parts[i] = oracle.turned(parts[i], case.cos.numpy(), case.sin.numpy(), spec.interleaved)
    if spec.value_norm:
        parts[2] = oracle.rms(parts[2], None, spec.value_norm.eps, False)
    same(case.q, parts[0])
    same(case.k[:, case.positions].transpose(0, 1).contiguous(), oracle.rounded(parts[1], spec.cache))
    same(case.v[case.positions], oracle.rounded(parts[2], spec.cache))
    others = [p for p in range(12) if p not in case.positions.tolist()]
    assert (case.k[:, others] == 9).all() and (case.v[others] == 9).all()


def test_a_ring_of_positions() -> None:
    whole, turned = Rows(CASES[0], 6, 3), Rows(replace(CASES[0], ring=64), 6, 3)
    turned.positions = whole.positions + torch.tensor([0, 64, 128, 0, 640, 64])
    whole.compute([])
    turned.compute([3])
    for name in "qkv":
        same(getattr(turned, name), getattr(whole, name))


@pytest.mark.parametrize("spec", CASES[:4], ids=str)
def test_a_row_has_the_same_bits_alone(spec: rotate.Rotate) -> None:
    together, alone = Rows(spec, 6, 3), Rows(spec, 6, 3)
    together.compute([])
    for row in range(6):
        alone.compute([], slice(row, row + 1))
    for name in "qkv":
        same(getattr(together, name), getattr(alone, name))


def test_it_is_what_transformers_computes() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    case = Rows(rotate.Rotate(4, 2, 16, 16, FP32), 5, 1)
    case.qkv = drawn(7, 5, 8 * 16)
    case.compute([])
    q, k, _ = case.qkv.view(5, 8, 16).transpose(0, 1)[None].split([4, 2, 2], 1)
    known = apply_rotary_pos_emb(q, k, *(torch.cat([table, table], -1)[None] for table in (case.cos, case.sin)))
    torch.testing.assert_close(case.q.transpose(0, 1)[None], known[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(case.k[:, case.positions][None], known[1], rtol=1e-5, atol=1e-6)
