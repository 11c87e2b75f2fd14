"""transformers' config.json from a GGUF model's metadata: the part common to all architectures.

Widths are taken from tensor shapes, which are reliable; everything else comes from metadata.
"""

from collections.abc import Mapping
from typing import Any

from core.errors import ModelError
from core.hf.bounds import MOST
from core.importing.sources.gguf.facts import ModelMetadata, shortest
from core.importing.sources.gguf.layout import ROPE_FACTORS
from core.system.gguf import damaged

SOFTMAX, SIGMOID = 1, 2  # ggml's ids of router scoring functions
TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}


def common(
    facts: ModelMetadata,
    model_type: str,
    kind: str,
    kv_heads: int | None = None,
    rotary: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The config values common to all decoders. `kind` is the model class; `kv_heads` and `rotary` where an
    architecture has its own."""
    heads = facts.need("attention.head_count")
    each = facts.by_layer("attention.head_count_kv", heads) if kv_heads is None else [kv_heads]
    shared = {count for count in each if count}  # 0: no attention there
    if len(shared) != 1:
        raise ModelError(
            "The layers of this GGUF model differ in their heads, which Moestro does not support. Import "
            "the model's safetensors version instead."
        )
    vocab, hidden = facts.shape("token_embd.weight")
    config = {
        "architectures": [kind],
        "model_type": model_type,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": facts.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared.pop(),
        "max_position_embeddings": facts.need("context_length"),
        "rms_norm_eps": facts.need("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope(facts) if rotary is None else rotary,
        "num_experts_per_tok": facts.need("expert_used_count"),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in facts.entries,
    }
    return config | {name: special_token(facts.metadata, key) for name, key in TOKENS.items()}


def special_token(metadata: Mapping[str, Any], key: str) -> int | None:
    """The id of a token such as "bos"; None where there is none, or an id outside the vocabulary, which some converters
    write to say so. Raises ModelError when it is not a number."""
    name = f"tokenizer.ggml.{key}_token_id"
    found, tokens = metadata.get(name), metadata.get("tokenizer.ggml.tokens")
    if found is None:
        return None
    if type(found) is not int:
        raise ModelError(f"This GGUF file's {name} is {found!r:.40}, which is no token. Download it again.")
    return found if 0 <= found < (len(tokens) if isinstance(tokens, list) else MOST.vocabulary) else None


def head_dim(facts: ModelMetadata) -> int:
    """Width of an attention head, from the query projection."""
    rows, heads = facts.shape(facts.first("attn_q.weight"))[0], int(facts.need("attention.head_count"))
    if rows % heads:
        raise damaged(facts.file, f"its {rows} rows of queries are no multiple of {heads} heads")
    stated = facts.get("attention.key_length")
    if stated not in (None, rows // heads):
        raise damaged(facts.file, f"its attention.key_length is {stated}, but its heads have {rows // heads}")
    return rows // heads


def experts(facts: ModelMetadata) -> int:
    """Routed experts per layer, from the router."""
    return facts.shape(f"blk.{facts.moe_layers[0]}.ffn_gate_inp.weight")[0]


def dense_size(facts: ModelMetadata) -> int:
    """Inner width of layers without experts; if there are none, the value in metadata."""
    dense = f"blk.{min(set(range(facts.layers)) - set(facts.moe_layers), default=-1)}.ffn_down.weight"
    return facts.shape(dense)[-1] if dense in facts.entries else facts.get("feed_forward_length") or facts.expert_size()


def mlp_kinds(facts: ModelMetadata) -> list[str]:
    """By layer, whether it has experts, as transformers calls it."""
    moe = set(facts.moe_layers)
    return ["sparse" if n in moe else "dense" for n in range(facts.layers)]


def shared_experts(facts: ModelMetadata) -> int:
    """Width of the shared expert in units of one expert's width."""
    name = f"blk.{facts.moe_layers[0]}.ffn_down_shexp.weight"
    return facts.shape(name)[-1] // facts.expert_size() if name in facts.entries else 0


def scored(facts: ModelMetadata, wanted: int) -> None:
    """Raises ModelError when the router's scoring function differs from transformers' model."""
    if facts.get("expert_gating_func", wanted) not in (0, wanted):
        raise ModelError(
            "This GGUF model's router scores experts in a way that its architecture does not have in "
            "transformers. Import the model's safetensors version instead."
        )


def normed(facts: ModelMetadata, wanted: bool) -> None:
    """Raises ModelError when the normalisation of selected experts' weights differs from transformers' model."""
    if bool(facts.get("expert_weights_norm", wanted)) != wanted:
        raise ModelError(
            "This GGUF model's router weighs experts in a way that its architecture does not have in "
            "transformers. Import the model's safetensors version instead."
        )


def refusal(what: str) -> ModelError:
    """The error for `what` a model has, which transformers' model of its architecture cannot have."""
    return ModelError(f"This GGUF model {what}. Import the model's safetensors version instead.")


def attention_kinds(facts: ModelMetadata, period: int) -> list[str]:
    """For each layer: whether its attention is full or within a sliding window. `period` where metadata has no pattern:
    every so many layers one is full."""
    key = "attention.sliding_window_pattern"
    pattern = facts.metadata.get(f"{facts.architecture}.{key}", period)
    if type(pattern) is int and pattern > 0:
        pattern = [(n + 1) % pattern != 0 for n in range(facts.layers)]
    if not isinstance(pattern, list) or len(pattern) < facts.layers or not all(v in (0, 1) for v in pattern):
        raise damaged(facts.file, f"its {key} is {pattern!r:.60}")
    return ["sliding_attention" if windowed else "full_attention" for windowed in pattern[: facts.layers]]


def rope(facts: ModelMetadata) -> dict[str, Any]:
    """Rotary embedding: base and scaling to long contexts. Raises ModelError for unsupported scaling."""
    theta = facts.get("rope.freq_base", 10000.0)
    kind = facts.get("rope.scaling.type", "none")
    factor = facts.get("rope.scaling.factor") or facts.get("rope.scale_linear")
    if ROPE_FACTORS & set(facts.entries):
        return _by_frequency(facts, theta, kind)
    if kind not in ("none", "linear", "yarn"):
        raise refusal(
            f"stretches its rotary embedding in the way {kind!r}, which this GGUF file does not describe fully"
        )
    if kind == "none" or not factor or factor == 1:
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": factor}
    found = {
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": factor,
        "original_max_position_embeddings": facts.need("rope.scaling.original_context_length"),
        "attention_factor": facts.get("rope.scaling.yarn_attn_factor") or facts.get("rope.scaling.attn_factor"),
        "beta_fast": facts.get("rope.scaling.yarn_beta_fast"),
        "beta_slow": facts.get("rope.scaling.yarn_beta_slow"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _by_frequency(facts: ModelMetadata, theta: float, kind: str) -> dict[str, Any]:
    """A divisor for each frequency: the same for all lengths (as Llama 3 has it), or one for short and one for long
    texts."""
    if (one := "rope_freqs.weight") in facts.entries:
        short = long = [shortest(value) for value in facts.values(one)]
        original, attention = facts.need("context_length"), 1.0
    else:
        short, long = ([shortest(v) for v in facts.values(f"rope_factors_{n}.weight")] for n in ("short", "long"))
        original = facts.need("rope.scaling.original_context_length")
        attention = facts.need("rope.scaling.attn_factor")
    if kind not in ("none", "longrope") or not all(0 < divisor < 1e6 for divisor in (*short, *long)):
        raise refusal("stretches its rotary embedding in two ways at once")
    return {
        "rope_type": "longrope",
        "rope_theta": theta,
        "short_factor": short,
        "long_factor": long,
        "factor": max(1.0, facts.need("context_length") / original),
        "attention_factor": attention,
        "original_max_position_embeddings": original,
    }
