"""Rotary embeddings in one call: the bits of the model's own function, and only where they are those."""

import functools
from collections.abc import Iterator
from types import MethodType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from core.hf import fused_rotary, rotary
from core.hf.cached_pass import cached_pass
from core.hf.own_forward import OWN, restore
from core.hf.packed import Packing
from core.hf.rotary import FEW, Rotation, replace
from core.hf.rotary_form import Form, Pair, rotated
from core.hf.text_to_text import empty_cache
from tests.checkpoints import ARCHITECTURES, EXTRA, MORE, random_model
from tests.hf.rotary_cases import DTYPES, FUNCTIONS, ON_GPU, Function, Sizes, bits, drawn, identical
from tests.selection import examples, layered

SIZES = Sizes(4, 2, 32, rest=16)


class ByTorch:
    """In the place of the GPU's kernel, which tests/memory/test_rotary_kernel.py and tests/gpu have."""

    def __init__(self, form: Form, states: Pair, tables: Pair, results: Pair) -> None:
        self.form, self._like = form, results

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        return tuple(
            torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(rotated(self.form, x, cos, sin))
            for like, x in zip(self._like, (q, k), strict=True)
        )


@pytest.fixture(autouse=True)
def _nothing_was_tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rotary, "_tried", {})
    monkeypatch.setattr(fused_rotary, "available", lambda device: device.type == "cpu")
    monkeypatch.setattr(fused_rotary, "made", ByTorch)
    with torch.inference_mode():
        yield


def chosen(rotation: Rotation) -> list[Any]:
    """For each kind of call so far, what computes it; None = the model's own function."""
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


# ---------------------------------------------------------------------- models

ROTATED = {  # width: of the tiny model's heads
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "granitemoe", "minimax_m2", "dots1"), "qwen3_moe"),
    **dict.fromkeys(("glm4_moe", "qwen3_next", "qwen3_5_moe_text"), "glm4_moe"),
    **dict.fromkeys(("lfm2_moe", "granitemoeshared", "hunyuan_v1_moe", "exaone_moe", "olmoe"), "qwen3_moe"),
    **dict.fromkeys(("deepseek_v3", "bailing_hybrid", "glm4_moe_lite", "deepseek_v32"), "deepseek_v3"),
    "gpt_oss": "gpt_oss",
    "flex_olmo": "flex_olmo",
    "ernie4_5_moe": "ernie4_5_moe",
}
LEFT_ALONE = {
    "deepseek_v2": "complex numbers, by a function of other parameters",
    "granitemoehybrid": "no positions in the tiny model",
    "jamba": "no positions",
    "nemotron_h": "no positions",
    "inkling_text": "relative positions",
}


def passes(model: Any) -> torch.Tensor:
    """The logits of a prompt, of three tokens, and of a short piece."""
    pieces, cache = torch.arange(3, 43)[None].split([33, 1, 1, 1, 4], 1), empty_cache(model.config)
    return torch.cat([cached_pass(model, piece, cache).logits[0] for piece in pieces])


@pytest.mark.parametrize(
    ("arch", "dtype"),
    layered(
        [(arch, dtype) for arch in [*ARCHITECTURES, *EXTRA, *MORE] for dtype in DTYPES],
        quick=lambda case: case[1] == torch.bfloat16 and case[0] in ("gpt_oss", "deepseek_v3", "ernie4_5_moe"),
    ),
)
def test_models(arch: str, dtype: torch.dtype) -> None:
    """Which are replaced, with the same logits, and what they were before is restored."""
    if arch not in CONFIG_MAPPING:
        pytest.skip(f"the installed transformers has no {arch}")
    model = random_model(arch, dtype=dtype).eval()
    before, state = passes(model), [dict(vars(module)) for module in model.modules()]
    found = replace(model)
    assert torch.equal(passes(model), before)
    tried: list[tuple[Any, Any]] = [(key, one) for own in rotary._tried.values() for key, one in own.items()]
    rotates = [one for key, one in tried if key[6][-1] == 1]  # gpt_oss's tables have gaps in transformers 5.17
    if arch in LEFT_ALONE:
        assert not any(rotates)
    else:
        function = FUNCTIONS[ROTATED[arch]]
        assert found and rotates
        assert {one.form for one in rotates} == {function.form(rotates[0].form.width, dtype)}
    restore(found)
    assert [dict(vars(module)) for module in model.modules()] == state
    assert torch.equal(passes(model), before)


def test_a_pass_over_several_sequences_leaves_it_where_it_is() -> None:
    """Latent attention is called for one sequence after the other, by a `forward` that the pass puts there."""
    model = random_model("deepseek_v3")
    found = replace(model)
    before, caches = [vars(module)[OWN] for module in found], [DynamicCache(config=model.config) for _ in range(2)]
    with Packing(model, [])._over(caches, [1, 1]):
        within = [vars(module)[OWN] for module in found]
    assert within != before
    assert [vars(module)[OWN] for module in found] == before


def test_every_architecture_of_the_suite_is_known() -> None:
    assert {*ROTATED, *LEFT_ALONE} == {*ARCHITECTURES, *EXTRA, *MORE}


class Attention(nn.Module):
    """Calls a function of this file, with a default, a keyword and a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q: Any, k: Any, cos: Any, sin: Any, more: float = 2.0, *, less: float = 1.0) -> Any:
        assert __class__ is Attention  # type: ignore[name-defined]
        return *apply_rotary_pos_emb(q, k, cos, sin), more - less


def renamed(forward: Any) -> Any:
    """A decorator such as transformers has for arguments with a new name."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *given: Any, **named: Any) -> Any:
        if "old" in named:
            named["more"] = named.pop("old")
        return forward(self, *given, **named)

    return wrapper


class Decorated(Attention):
    @renamed
    @torch.no_grad()
    def forward(self, q: Any, k: Any, cos: Any, sin: Any, more: float = 2.0) -> Any:  # type: ignore[override]
        return *apply_rotary_pos_emb(q, k, cos, sin), more


class Cached(Attention):
    forward = functools.lru_cache(apply_rotary_pos_emb)  # type: ignore[assignment]


class Shadowed(Attention):
    pass


def test_forwards_are_copied_whole_and_what_does_not_fit_is_left_alone() -> None:
    shadowed, states = Shadowed(), drawn(FUNCTIONS["qwen3_moe"], SIZES, torch.float32)
    shadowed.forward = lambda *given: given  # type: ignore[method-assign]
    model = nn.ModuleList([Attention(), Attention(), Decorated(), shadowed, Attention().to("meta"), Cached()])
    found = replace(model)
    assert found == [model[0], model[1], model[2]] and replace(model) == []
    assert model[2](*states, old=5.0)[2] == 5.0 and rotary._tried[apply_rotary_pos_emb], "the inner one calls ours"
    assert vars(model[0])[OWN].__func__ is vars(model[1])[OWN].__func__, "one copy for a class"
    for module in model[:3]:
        assert identical(module(*states)[:2], apply_rotary_pos_emb(*states))
    assert model[0](*states, 5.0, less=2.0)[2] == 3.0 and model[1](*states)[2] == 1.0
    assert isinstance(vars(model[0])[OWN], MethodType)
    assert Attention.forward.__globals__["apply_rotary_pos_emb"] is apply_rotary_pos_emb
    restore(found)
    assert not any(OWN in vars(module) for module in model[:3])


def test_without_a_gpu_nothing_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert replace(nn.ModuleList([Attention()])) == []
