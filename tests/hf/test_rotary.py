"""Rotary embeddings in one call: the bits of the model's own function, and only where they are those."""

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from core.hf import fused_rotary
from core.hf.adapters import adapt
from core.hf.rotary import FEW, Rotation
from tests.hf.rotary_cases import DTYPES, FUNCTIONS, ON_GPU, SIZES, ByTorch, Function, Sizes, bits, drawn, identical
from tests.selection import examples, layered

pytestmark = pytest.mark.usefixtures("rotary_by_torch")


def chosen(rotation: Rotation) -> list[Any]:
    return list(rotation._tried.values())


@pytest.mark.parametrize("dtype", layered(DTYPES, quick=lambda dtype: dtype == torch.bfloat16), ids=str)
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_every_bit_is_the_functions_own(function: Function, dtype: torch.dtype) -> None:
    """What it is taken for, and what that gives, also for numbers that are not finite."""
    own, sizes = function.own, [SIZES, SIZES._replace(tokens=3), SIZES._replace(split=True), Sizes(32, 4, 128)]
    for one in sizes:
        rotation, states = Rotation(own), drawn(function, one, dtype)
        for seed in range(3):
            assert identical(rotation(*states), own(*states)), one
            states = drawn(function, one, dtype, seed=seed)
        assert chosen(rotation)[-1].form == function.form(one.width, dtype)
        for odd in (float("inf"), float("nan"), 0.0):
            states[0].fill_(odd)
            got, want = (f(*states)[0] for f in (rotation, own))
            assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(1), want.nan_to_num(1))
    assert len(chosen(rotation)) == len(sizes)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=list(FUNCTIONS))
def test_its_form_can_be_told_at_the_sizes_that_are_tried_on_a_gpu(function: Function) -> None:
    for sizes in ON_GPU:
        rotation = Rotation(function.own)
        rotation(*drawn(function, sizes, torch.float32))
        assert chosen(rotation)[-1].form == function.form(sizes.width, torch.float32), sizes


@examples(40)
@given(
    function=st.sampled_from(list(FUNCTIONS.values())),
    dtype=st.sampled_from(DTYPES),
    sizes=st.builds(
        Sizes,
        heads=st.integers(1, 5),
        keys=st.integers(1, 3),
        width=st.integers(2, 24).map(lambda half: 2 * half),
        rest=st.integers(0, 20),
        tokens=st.integers(1, 4),
        split=st.booleans(),
    ),
)
def test_any_sizes(function: Function, dtype: torch.dtype, sizes: Sizes) -> None:
    own, rotation = function.own, Rotation(function.own)
    rotation._tried.clear()
    rotation(*drawn(function, sizes, dtype))
    assert chosen(rotation) != [None]
    states = drawn(function, sizes, dtype, seed=7)
    assert identical(rotation(*states), own(*states))


def test_other_calls_are_left_to_the_models_own_function() -> None:
    function, calls = FUNCTIONS["qwen3_moe"], list[Any]()

    def own(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        calls.append(q)
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)

    rotation, usual = Rotation(own), drawn(function, SIZES, torch.bfloat16)
    rotation(*usual)
    tried = len(calls)
    rotation(*usual)
    assert len(calls) == tried
    q, k, cos, sin = usual
    batch = [one.expand(2, *one.shape[1:]) for one in usual]
    apart = [one.repeat_interleave(2, -1)[..., ::2] for one in usual]
    for states in (batch, apart, drawn(function, SIZES._replace(tokens=FEW + 1), torch.bfloat16)):
        assert identical(rotation(*states), apply_rotary_pos_emb(*states))
        assert calls.pop() is states[0]
    assert rotation(q=q, k=k, cos=cos, sin=sin)[0].shape == q.shape and calls.pop() is q
    turned = [q.transpose(1, 2), k.transpose(1, 2), cos, sin]
    assert identical(rotation(*turned, unsqueeze_dim=2), apply_rotary_pos_emb(*turned, unsqueeze_dim=2))
    assert calls.pop() is turned[0]
    with torch.inference_mode(False), torch.enable_grad():
        q = torch.randn(q.shape, requires_grad=True)
        rotation(q, *(torch.randn(one.shape) for one in (k, cos, sin)))[0].sum().backward()
        assert q.grad is not None and calls.pop() is q
    wide = [q.detach() if at == 0 else one for at, one in enumerate(usual)]  # queries fp32, keys bf16
    assert identical(rotation(*wide), apply_rotary_pos_emb(*wide)) and chosen(rotation)[-1] is None


@pytest.mark.parametrize("number", [0, 17, 63, -1])
def test_one_wrong_bit_in_the_trial_is_found(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    function, real = FUNCTIONS["qwen3_moe"], ByTorch.__call__

    def off(self: Any, *given: Any) -> Any:
        got = real(self, *given)
        bits(got[0].view(-1))[number] ^= 1
        return got

    monkeypatch.setattr(ByTorch, "__call__", off)
    rotation, states = Rotation(function.own), drawn(function, SIZES, torch.bfloat16)
    assert identical(rotation(*states), function.own(*states))
    assert chosen(rotation) == [None]


def test_results_of_other_strides_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    function, real = FUNCTIONS["qwen3_moe"], ByTorch.__call__
    contiguous = functools.partial(map, torch.Tensor.contiguous)
    monkeypatch.setattr(ByTorch, "__call__", lambda self, *given: tuple(contiguous(real(self, *given))))
    rotation = Rotation(function.own)
    rotation(*drawn(function, SIZES._replace(tokens=2), torch.float32))
    assert chosen(rotation) == [None]


def test_results_whose_numbers_are_not_adjacent_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's have it where a couple is all that there is."""
    function, made = FUNCTIONS["deepseek_v3"], list[object]()
    monkeypatch.setattr(fused_rotary, "made", lambda *given: made.append(given))
    rotation, states = Rotation(function.own), drawn(function, Sizes(5, 1, 2, tokens=2), torch.float32)
    assert rotation(*states)[0].stride(-1) != 1
    assert chosen(rotation) == [None] and not made


def test_what_is_no_rotation_is_left_alone() -> None:
    """The same parameters, another computation: a table's entries are taken twice, or two tokens are mixed."""

    def doubled(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos * cos, sin)

    def mixed(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos.flip(1), sin)

    def one(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin)[0]

    def queries(q: torch.Tensor, k: Any = None, cos: Any = None, sin: Any = None) -> Any:
        return apply_rotary_pos_emb(q, q if k is None else k, cos, sin)[0 if k is None else slice(2)]

    states = drawn(FUNCTIONS["qwen3_moe"], SIZES._replace(tokens=2), torch.float32)
    rotation, (q, _, cos, sin) = Rotation(queries), states
    for got in (rotation(q, cos=cos, sin=sin), rotation(q, None, cos, sin)):
        assert torch.equal(got, queries(q, cos=cos, sin=sin))
    assert not chosen(rotation) and identical(rotation(*states), queries(*states)) and chosen(rotation) != [None]
    for own in (doubled, mixed, one):
        rotation = Rotation(own)
        assert torch.equal(rotation(*states)[0], own(*states)[0])
        assert chosen(rotation) == [None]


def rotary(long: float) -> PhimoeRotaryEmbedding:
    rope = dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0, 1.25, 2.0, 3.0],
        long_factor=[1.0, 4.0, 16.0, 64.0],
        short_mscale=1.25,
        long_mscale=long,
        original_max_position_embeddings=64,
    )
    return PhimoeRotaryEmbedding(
        AutoConfig.for_model("phimoe", hidden_size=32, num_attention_heads=4, rope_parameters=rope)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cosines_and_sines_are_transformers_own(dtype: torch.dtype) -> None:
    own, ours = rotary(1.25), rotary(1.25)
    adapt(ours)
    for positions in (torch.arange(8)[None], torch.arange(60, 100)[None]):  # the second beyond the original length
        like = torch.ones(1, dtype=dtype)
        for wanted, got in zip(own(like, positions), ours(like, positions), strict=True):
            assert torch.equal(got, wanted) and got.dtype == dtype
    cos, _ = ours(torch.ones(1, device="meta"), torch.ones(1, 5, dtype=torch.long, device="meta"))
    assert cos.shape == (1, 5, 8)


def test_with_two_factors_it_decides_as_before() -> None:
    ours = rotary(1.5)
    adapt(ours)
    assert type(ours) is PhimoeRotaryEmbedding
