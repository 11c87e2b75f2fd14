"""Which models' forwards rotate in one call, with the same logits; what they were before is restored."""

import functools
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.qwen3_moe.modeling_qwen3_moe import apply_rotary_pos_emb

from core.hf import rotary
from core.hf.cached_pass import cached_pass
from core.hf.own_forward import OWN, restore
from core.hf.packed import Packing
from core.hf.rotary import replace
from core.hf.text_to_text import empty_cache
from tests.checkpoints import ARCHITECTURES, EXTRA, MORE, random_model
from tests.hf.rotary_cases import DTYPES, FUNCTIONS, SIZES, drawn, identical
from tests.selection import layered

pytestmark = pytest.mark.usefixtures("rotary_by_torch")

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
