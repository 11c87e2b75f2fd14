"""Attention over the KV cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.runtime.program.attend import FIELDS, NO_WINDOW, kernel
from core.runtime.program.attend_block import Attend
from tests.runtime.program import oracle
from tests.runtime.program.calls import call, drawn, needs_kernels, same
from tests.selection import layered

pytestmark = needs_kernels
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CASES = [
    Attend(4, 1, 16, 16, BF16, 0.25),
    Attend(2, 2, 12, 20, FP32, 0.3),
    Attend(4, 2, 72, 64, FP16, 0.12, softcap=3.0),
    Attend(3, 1, 144, 136, BF16, 0.08, sinks=True),
    Attend(5, 1, 8, 8, FP32, 0.35, softcap=0.5, sinks=True),
    Attend(9, 1, 16, 32, BF16, 0.25),
    Attend(6, 2, 72, 20, BF16, 0.12, more=16),
    Attend(1, 1, 12, 12, FP32, 0.3, more=4, sinks=True),
]


class Rows:
    """Drawn queries, and a cache that holds NaN where nothing was written."""

    def __init__(self, spec: Attend, positions: torch.Tensor, seed: int, *, capacity: int = 0, wild: bool = False):
        self.spec, self.positions, written = spec, positions, int(positions.max()) + 1
        self.q = drawn(seed, len(positions), spec.query_heads, spec.width + spec.more, wild=wild) * 2
        capacity = max(capacity, written)
        self.k = torch.full((spec.heads, capacity, spec.width), torch.nan).to(spec.cache)
        self.v = torch.full((capacity, spec.heads, spec.values), torch.nan).to(spec.cache)  # another order of strides
        self.k[:, :written] = drawn(seed + 1, spec.heads, written, spec.width, wild=wild).to(spec.cache)
        self.v[:written] = drawn(seed + 2, written, spec.heads, spec.values, wild=wild).to(spec.cache)
        self.more = torch.full((capacity, spec.more), torch.nan).to(spec.cache)
        self.more[:written] = drawn(seed + 4, written, spec.more or 1, wild=wild)[:, : spec.more].to(spec.cache)
        self.sinks = drawn(seed + 3, spec.query_heads)
        self.out = torch.empty(len(positions), spec.query_heads, spec.values)

    def compute(self, splits: list[int] | tuple[int, ...] = (), window: int = NO_WINDOW) -> torch.Tensor:
        size, rows = self.spec.cache.itemsize, len(self.positions)
        call(
            kernel(self.spec),
            FIELDS,
            rows * self.spec.heads,
            splits,
            q=self.q,
            k=self.k,
            v=self.v,
            out=self.out,
            sinks=self.sinks,
            positions=self.positions,
            rows=rows,
            window=window,
            k_head_stride=self.k.shape[-2] * self.spec.width * size,
            k_row_stride=self.spec.width * size,
            v_head_stride=self.spec.values * size,
            v_row_stride=self.spec.heads * self.spec.values * size,
            more=self.more,
            more_row_stride=self.spec.more * size,
        )
        return self.out

    def known(self, window: int = NO_WINDOW) -> torch.Tensor:
        width, filling = self.spec.width, -self.spec.width % 8 if self.spec.more else 0  # up to the next lane 0

        def filled(own: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            return torch.cat([own, own.new_zeros(*own.shape[:-1], filling), shared], -1)

        keys = filled(self.k.float(), self.more.float().expand(self.spec.heads, -1, -1))
        return torch.from_numpy(
            oracle.attend(
                filled(self.q[..., :width], self.q[..., width:]).numpy(),
                keys.numpy(),
                self.v.float().transpose(0, 1).numpy(),
                self.positions.numpy(),
                scale=self.spec.scale,
                window=window,
                softcap=self.spec.softcap,
                sinks=self.sinks.numpy() if self.spec.sinks else None,
            )
        )


@pytest.mark.parametrize("spec", CASES, ids=str)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    positions=st.lists(st.integers(0, 140), min_size=1, max_size=3),
    splits=st.lists(st.integers(0, 20), max_size=3),
    window=st.sampled_from([NO_WINDOW, 1, 7, 64, 70]),
)
def test_rows(spec: Attend, seed: int, positions: list[int], splits: list[int], window: int) -> None:
    case = Rows(spec, torch.tensor(positions), seed)
    same(case.compute(splits, window), case.known(window))


@pytest.mark.parametrize("spec", layered(CASES, quick=lambda spec: CASES.index(spec) % 2 == 0), ids=str)
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    first=st.integers(0, 90),
    rows=st.integers(4, 10),
    splits=st.lists(st.integers(0, 20), max_size=3),
    window=st.sampled_from([NO_WINDOW, 3, 66]),
)
def test_rows_of_a_prompt(spec: Attend, seed: int, first: int, rows: int, splits: list[int], window: int) -> None:
    case = Rows(spec, torch.arange(first, first + rows), seed)
    same(case.compute(splits, window), case.known(window))


@pytest.mark.parametrize(("spec", "rows"), [(CASES[0], 1), (CASES[1], 5), (CASES[3], 3)], ids=str)
@pytest.mark.parametrize("last", [120, 127, 128, 200, 391])
def test_a_ring_of_keys(spec: Attend, rows: int, last: int) -> None:
    """The bits are those of keys that lie in the order of their positions."""
    ring, window = 128, 60
    whole = Rows(spec, torch.arange(last - rows + 1, last + 1), 3)
    turned = Rows(replace(spec, ring=ring), whole.positions, 3)
    turned.k = torch.full((spec.heads, ring, spec.width), torch.nan).to(spec.cache)
    turned.v = torch.full((ring, spec.heads, spec.values), torch.nan).to(spec.cache)
    kept = torch.arange(max(0, last + 1 - ring), last + 1)
    turned.k[:, kept % ring], turned.v[kept % ring] = whole.k[:, kept], whole.v[kept]
    same(turned.compute(window=window), whole.compute(window=window))


def test_values_can_be_a_part_of_keys() -> None:
    """As in latent attention: one head of keys, given as two (0 bytes apart) so that two threads can share the work."""
    one, two = (Rows(Attend(8, heads, 40, 32, BF16, 0.2), torch.tensor([70, 71]), 1) for heads in (1, 2))
    latent = one.k[0]
    size = 40 * BF16.itemsize
    strides = {"k_head_stride": 0, "v_head_stride": 0, "k_row_stride": size, "v_row_stride": size}
    for rows in (one, two):
        given = dict(q=one.q, k=latent, v=latent, positions=one.positions, out=rows.out)
        units = 2 * rows.spec.heads
        call(kernel(rows.spec), FIELDS, units, [1], rows=2, window=NO_WINDOW, **given, **strides)
    same(two.out, one.out)
    values = latent[:, None, :32].float().transpose(0, 1).numpy()
    same(one.out, oracle.attend(one.q.numpy(), one.k.float().numpy(), values, one.positions.numpy(), scale=0.2))


@pytest.mark.skipif(
    not hasattr(os, "fork"), reason="needs memory that cannot be read, and a process that may die of it"
)
def test_nothing_is_read_but_the_keys_of_a_row() -> None:
    """Keys 1 to 3 fill the end of a page: what is before and after it cannot be read."""
    spec, page = Attend(1, 1, 8, 8, FP32, 1.0), mmap.PAGESIZE
    memory = mmap.mmap(-1, 3 * page)
    begin = np.frombuffer(memory, np.uint8).ctypes.data
    for guard in (begin, begin + 2 * page):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0
    q, out, positions = torch.ones(1, 8), torch.empty(1, 8), torch.tensor([3])
    for keys in (begin + 2 * page - 4 * 32, begin + page - 32):  # position 0, which the window leaves out
        strides = {"k_row_stride": 32, "v_row_stride": 32}
        given = dict(q=q, k=keys, v=keys, out=out, positions=positions, rows=1, window=3, **strides)
        kernel(spec)
        if not (child := os.fork()):
            call(kernel(spec), FIELDS, 1, **given)  # type: ignore[arg-type]
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("spec", CASES[:4], ids=str)
def test_rows_of_odd_numbers(spec: Attend) -> None:
    """Infinities and NaN in queries, keys, values and sinks."""
    for seed in range(4):
        case = Rows(spec, torch.tensor([3, 90, 17]), seed * 10, wild=True)
        case.sinks[:2] = torch.tensor([torch.nan, -torch.inf])
        same(case.compute(), case.known())


def test_scores_that_are_all_minus_infinity_at_first() -> None:
    """The first block of keys weighs nothing; a row that has only such keys is NaN."""
    case = Rows(Attend(1, 1, 8, 8, FP32, 1.0), torch.tensor([40, 70]), 1)
    case.q = torch.ones(2, 1, 8)
    case.k[0, :64] = -torch.inf
    found = case.compute()
    same(found, case.known())
    assert found[0].isnan().all() and found[1].isfinite().all()


@pytest.mark.parametrize("spec", CASES, ids=str)
def test_a_row_has_the_same_bits_alone_and_for_any_capacity(spec: Attend) -> None:
    positions = torch.tensor([0, 7, 63, 64, 127, 130])
    together = Rows(spec, positions, 5, capacity=300)
    together.compute()
    for row, position in enumerate(positions.tolist()):
        alone = Rows(spec, positions[row : row + 1], 5)
        alone.q, alone.sinks = together.q[row : row + 1], together.sinks
        alone.k[:], alone.v[:] = together.k[:, : position + 1], together.v[: position + 1]
        alone.more[:] = together.more[: position + 1]
        same(alone.compute(), together.out[row : row + 1])


def test_it_is_what_torch_computes() -> None:
    spec = Attend(8, 2, 64, 64, FP32, 0.125)
    case = Rows(spec, torch.arange(100), 3)
    q, k, v = case.q.transpose(0, 1)[None], case.k[None], case.v.transpose(0, 1)[None]
    known = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(case.compute().transpose(0, 1)[None], known, rtol=1e-5, atol=2e-6)


def test_sinks_and_soft_caps_are_those_of_the_models() -> None:
    """A sink is a column of the softmax that has no value; a cap bounds scores by tanh."""
    case = Rows(Attend(4, 2, 16, 16, FP32, 0.25, softcap=2.0, sinks=True), torch.tensor([90]), 3)
    k, v = (x.repeat_interleave(2, 0) for x in (case.k, case.v.transpose(0, 1)))
    scores = torch.tanh(torch.einsum("hd,hkd->hk", case.q[0], k) * 0.25 / 2) * 2
    weights = torch.cat([scores, case.sinks[:, None]], 1).softmax(1)[:, :-1]
    known = torch.einsum("hk,hkd->hd", weights, v)
    torch.testing.assert_close(case.compute()[0], known, rtol=1e-5, atol=2e-6)
