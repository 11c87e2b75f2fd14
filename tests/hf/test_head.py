"""The head's states and logits: against a few lines of torch, and against a transformers model of one layer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.hf.head import MtpHead, head_of
from core.hf.hooks import BOUND
from core.hf.reserved_tensor import Allocated
from core.hf.skeleton import load_skeleton
from tests.mtp_checkpoint import head_of_checkpoint, tensors_of, with_head

TOKENS = [7, 200, 31, 4, 4, 90, 15, 222, 8, 61, 3, 77]
ARCHS = "glm4_moe", "deepseek_v3", "qwen3_next", "qwen3_5_moe_text", "mimo_v2_flash"
Weights = Mapping[str, torch.Tensor]


class Case:
    """A head, whose experts are computed one by one, and its weights by their names within the layer."""

    def __init__(self, arch: str, path: Path) -> None:
        self.path = with_head(arch, path)
        self.all = tensors_of(self.path)
        self.own = {one: self.all[name] for name, one in head_of_checkpoint(self.all).items()}
        self.one = float(arch.startswith("qwen"))  # is what its norms add to their weights
        self.model = load_skeleton(self.path, head=True)
        found = head_of(self.model)
        assert found is not None
        self.head: MtpHead = found
        if found.site is not None:
            setattr(found.site.module, BOUND, self.experts)
        draw = torch.Generator().manual_seed(3)
        self.hidden = torch.randn(len(TOKENS), self.model.config.hidden_size, generator=draw)
        self.embedded = self.all["model.embed_tokens.weight"][TOKENS]

    def experts(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return experts(self.own, hidden, ids, weights)

    def joined(self, first: int = 0) -> torch.Tensor:
        eps = self.model.config.rms_norm_eps
        embedded = rms(self.embedded[first:], self.one + self.own["enorm.weight"], eps)
        hidden = rms(self.hidden[first:], self.one + self.own["hnorm.weight"], eps)
        return torch.cat((embedded, hidden), -1) @ self.own["eh_proj.weight"].t()


@pytest.fixture(scope="module", params=ARCHS)
def case(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("head"))


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def mlp(of: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    gate, up, down = (of[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def experts(of: Weights, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    rows = [
        sum(
            (
                weight * mlp(of, f"mlp.experts.{int(expert)}", row)
                for expert, weight in zip(chosen, shares, strict=True)
            ),
            torch.zeros_like(row),
        )
        for row, chosen, shares in zip(x, ids, weights, strict=True)
    ]
    return torch.stack(rows)


def glm_layer(of: Weights, x: torch.Tensor, config: Any) -> torch.Tensor:
    """GLM-4.x's decoder layer over one text [T, H]: attention with rotated halves of a part of each head, sigmoid
    routing with a bias that only chooses, and an expert that all tokens share."""
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    count, normed = len(x), rms(x, of["input_layernorm.weight"], config.rms_norm_eps)
    queries, keys, values = (
        (normed @ of[f"self_attn.{one}_proj.weight"].t() + of.get(f"self_attn.{one}_proj.bias", 0))
        .view(count, -1, width)
        .transpose(0, 1)
        for one in "qkv"
    )
    turned = int(width * config.rope_parameters["partial_rotary_factor"])
    base = config.rope_parameters["rope_theta"] ** (-torch.arange(0, turned, 2) / turned)
    angles = torch.arange(count)[:, None] * base

    def rotate(one: torch.Tensor) -> torch.Tensor:
        a, b, rest = one[..., : turned // 2], one[..., turned // 2 : turned], one[..., turned:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest), -1)

    keys, values = (one.repeat_interleave(heads // groups, 0) for one in (rotate(keys), values))
    scores = rotate(queries) @ keys.transpose(1, 2) * width**-0.5
    shares = scores.masked_fill(torch.ones(count, count).triu(1).bool(), float("-inf")).softmax(-1)
    x = x + (shares @ values).transpose(0, 1).reshape(count, -1) @ of["self_attn.o_proj.weight"].t()
    normed = rms(x, of["post_attention_layernorm.weight"], config.rms_norm_eps)
    likely = (normed @ of["mlp.gate.weight"].t()).sigmoid()
    ids = (likely + of["mlp.gate.e_score_correction_bias"]).topk(config.num_experts_per_tok).indices
    weights = likely.gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True) * config.routed_scaling_factor
    return x + experts(of, normed, ids, weights) + mlp(of, "mlp.shared_experts", normed)


def mimo_layer(of: Weights, x: torch.Tensor, config: Any) -> torch.Tensor:
    """The layer of MiMo-V2-Flash's heads (arXiv 2601.02780) over one text [T, H]: attention to a window, with a sink
    for each head, values of another width than keys, which are scaled, and rotated halves of a part of each head; and a
    dense layer."""
    count, normed, width = len(x), rms(x, of["input_layernorm.weight"], config.rms_norm_eps), config.head_dim
    queries, keys, values = (
        (normed @ of[f"self_attn.{one}_proj.weight"].t()).view(count, -1, wide).transpose(0, 1)
        for one, wide in (("q", width), ("k", width), ("v", config.v_head_dim))
    )
    stated = config.rope_parameters["sliding_attention"]
    turned = int(width * stated["partial_rotary_factor"])
    angles = torch.arange(count)[:, None] * stated["rope_theta"] ** (-torch.arange(0, turned, 2) / turned)

    def rotate(one: torch.Tensor) -> torch.Tensor:
        a, b, rest = one[..., : turned // 2], one[..., turned // 2 : turned], one[..., turned:]
        return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin(), rest), -1)

    heads = config.num_attention_heads
    keys, values = (one.repeat_interleave(heads // len(one), 0) for one in (rotate(keys), values))
    scores = rotate(queries) @ keys.transpose(1, 2) * width**-0.5
    seen = torch.ones(count, count).tril().triu(1 - config.sliding_window).bool()
    sinks = of["self_attn.attention_sink_bias"].view(-1, 1, 1).expand(-1, count, 1)
    shares = torch.cat((scores.masked_fill(~seen, float("-inf")), sinks), -1).softmax(-1)[..., :-1]
    mixed = config.attention_value_scale * (shares @ values)
    x = x + mixed.transpose(0, 1).reshape(count, -1) @ of["self_attn.o_proj.weight"].t()
    return x + mlp(of, "mlp", rms(x, of["post_attention_layernorm.weight"], config.rms_norm_eps))


@pytest.mark.parametrize(("arch", "layer"), [("glm4_moe", glm_layer), ("mimo_v2_flash", mimo_layer)])
def test_a_few_lines_of_torch(arch: str, layer: Any, tmp_path: Path) -> None:
    case = Case(arch, tmp_path)
    config = case.model.config
    assert not getattr(config, "use_qk_norm", False) and config.norm_topk_prob and config.n_group == 1
    assert not case.head.window[0] or case.head.window[0] < len(TOKENS)
    wanted = rms(layer(case.own, case.joined(), config), case.own["shared_head.norm.weight"], config.rms_norm_eps)
    found = case.head.states(case.hidden, TOKENS, 0, case.head.cache(32, Allocated()))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    logits = wanted[-1] @ case.all["lm_head.weight"].t()
    torch.testing.assert_close(case.head.logits(found), logits, atol=1e-4, rtol=1e-4)


def one_layer(case: Case) -> Any:
    """A transformers model whose only layer is the head's."""
    stated = case.model.config.to_dict() | {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    for name in ("mlp_layer_types", "layer_types", "model_type"):
        stated.pop(name, None)
    kinds: dict[str, Any] = {"layer_types": ["full_attention"]} if case.one else {}
    kinds |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]} if case.head.window[0] else {}
    model = AutoModelForCausalLM.from_config(type(case.model.config)(**stated, **kinds)).eval()
    layer = model.model.layers[0]
    others = "mlp.experts.", "eh_proj", "enorm", "hnorm", "shared_head", "embed_tokens"
    own = {name: one for name, one in case.own.items() if not name.startswith(others)}
    own = {name.replace("attention_sink_bias", "sinks"): one for name, one in own.items()}
    stacked = (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",)))
    for part, names in stacked if case.head.site is not None else ():
        each = [
            torch.cat([case.own[f"mlp.experts.{at}.{name}.weight"] for name in names])
            for at in range(case.head.site.num_experts)
        ]
        own[f"mlp.experts.{part}"] = torch.stack(each)
    layer.load_state_dict(own)
    model.model.norm.load_state_dict({"weight": case.own["shared_head.norm.weight"]})
    model.lm_head.load_state_dict({"weight": case.all["lm_head.weight"]})
    return model


def test_a_transformers_model_of_one_layer(case: Case) -> None:
    with torch.no_grad():
        wanted = one_layer(case)(inputs_embeds=case.joined()[None]).logits[0]
    found = case.head.states(case.hidden, TOKENS, 0, case.head.cache(32, Allocated()))
    for at in range(len(TOKENS)):
        torch.testing.assert_close(case.head.logits(found[: at + 1]), wanted[at], atol=1e-4, rtol=1e-4)


def test_pieces_and_what_is_cut(case: Case) -> None:
    """Keys and values of guesses are cut away, and others written in their place."""
    whole = case.head.states(case.hidden, TOKENS, 0, case.head.cache(32, Allocated()))
    cache, found = case.head.cache(16, Allocated()), []
    for begin, end in ((0, 5), (5, 6), (6, 12)):
        found.append(case.head.states(case.hidden[begin:end], TOKENS[begin:end], begin, cache))
        for at in range(end, end + 3):  # guesses, each from the state before it
            case.head.states(found[-1][-1:], [9], at, cache)
        cache.cut(end)
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-5, rtol=1e-5)


def test_a_text_whose_beginning_it_does_not_see(case: Case) -> None:
    """Only what is there has keys; their angles are those of the text's positions, and so is what they differ by."""
    first = 4
    found = case.head.states(case.hidden[first:], TOKENS[first:], first, case.head.cache(32, Allocated()))
    with torch.no_grad():
        wanted = one_layer(case)(inputs_embeds=case.joined(first)[None]).logits[0, -1]
    torch.testing.assert_close(case.head.logits(found), wanted, atol=1e-3, rtol=1e-3)


def test_its_memory_is_counted(case: Case) -> None:
    allocated = Allocated()
    cache = case.head.cache(32, allocated)
    assert allocated.bytes == 0
    case.head.states(case.hidden[:1], TOKENS[:1], 0, cache)
    a_position = allocated.bytes // 32
    assert a_position > 0
    with pytest.raises(ValueError, match="holds 32 tokens"):
        case.head.states(case.hidden.repeat(3, 1), TOKENS * 3, 1, cache)
