"""Types and bounds of the config.json values that determine what is built, allocated and computed.

Checked once, when a config is read; later code can rely on it. transformers checks the types of its own fields, but
neither bounds nor NaN, and would build a model of 2 ** 31 layers.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Most(NamedTuple):
    """Upper bounds: far above every existing model, and far below what would keep a machine busy for minutes."""

    layers: int = 1000
    experts: int = 1 << 14  # routed experts per layer
    width: int = 1 << 20  # width of any layer
    vocabulary: int = 1 << 23
    tokens: int = 1 << 30  # context length


MOST = Most()
LAYERS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TOP_K = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "num_selected_experts",
    "top_k_experts",
)
CONTEXT = ("max_position_embeddings", "n_positions", "max_sequence_length", "model_max_length")
FULL = ("hidden_size", "d_model", "n_embd", "num_attention_heads", "n_head", "n_heads")
"""Widths that are at least 1 where they are stated."""
PARTIAL = ("head_dim", "v_head_dim", "qk_rope_head_dim", "kv_lora_rank", "intermediate_size", "moe_intermediate_size")
"""Widths that some models state as 0, for what they do not have. Of those that have it, the weights tell."""
COUNTED = ((re.compile(r".*(layers?|depth)"), MOST.layers), (re.compile(r".*experts"), MOST.experts))
"""Other numbers that models loop over, and the most of each."""
DTYPES = ("dtype", "torch_dtype")
NUMBER_TYPE = re.compile(r"(torch\.)?(auto|half|float|double|bfloat16|float(16|32|64)|float8_\w+|u?int(8|16|32|64))")
EPS = re.compile(r"(.*_)?(eps|epsilon)")
BASE = re.compile(r"(.*_)?(rope_theta|rotary_emb_base|rope_local_base_freq|global_rope_theta|local_rope_theta)")
UNROTATED = ("layer_rope_theta",)
"""Such numbers where 0 stands for layers without rotation."""
ROPE = ("rope_parameters", "rope_scaling")
ROPE_POSITIVE = (
    "factor",
    "short_factor",
    "long_factor",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "original_max_position_embeddings",
)
SCALES = (
    "routed_scaling_factor",
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
OBJECTS = ("text_config", "auto_map")


def wrong(config: Mapping[str, Any]) -> str:
    """The problem with a config, as the end of a sentence: "num_hidden_layers is 0, not ..."; "" when there is none."""
    for name in OBJECTS:
        if not isinstance(config.get(name, {}), Mapping):
            return f"its {name} is {config[name]!r:.60}, not an object"
    for path, name, value in _values(config, ""):
        if isinstance(value, float) and math.isnan(value):
            return f"its {path} is not a number (NaN)"
        if wanted := _wanted(path, name, value):
            return f"its {path} is {value!r:.60}, not {wanted}"
    for where, part in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(part, Mapping) and (found := _chosen(part)):
            return f"its {where}{found}"
    return ""


def _values(part: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yields (path, name, value) of everything below; a list's values have the name of the list, unless there can be no
    list of that name."""
    for name, value in part.items():
        for each in value if isinstance(value, list) and name not in DTYPES else [value]:
            yield f"{path}{name}", name, each
            if isinstance(each, Mapping):
                yield from _values(each, f"{path}{name}.")


def _wanted(path: str, name: str, value: Any) -> str:
    """What a value should have been, or "" if it is valid. null stands for transformers' default."""
    if value is None or path.startswith(("quantization_config", "vision_config", "audio_config")):
        return ""
    if name in DTYPES and not isinstance(value, Mapping) and not NUMBER_TYPE.fullmatch(str(value)):
        return "a number type"
    bounds = _bounds(name)
    if bounds is not None:
        least, most = bounds
        good = type(value) is int and least <= value <= most
        return "" if good else f"a whole number from {least:,} to {most:,}"
    for names, most in COUNTED:
        if isinstance(value, int) and value > most and names.fullmatch(name):
            return f"{most:,} at most"
    if name in UNROTATED and value == 0 and type(value) in (int, float):
        return ""
    in_rope = any(f"{rope}." in path for rope in ROPE)
    positive = BASE.fullmatch(name) is not None or (in_rope and name in ROPE_POSITIVE)
    if positive and not (_number(value) and value > 0):
        return "a number above 0"
    if name == "partial_rotary_factor" and not (_number(value) and 0 < value <= 1):
        return "a share above 0 and up to 1"
    if EPS.fullmatch(name) and not (_number(value) and 0 <= value < 1):
        return "a number from 0 to 1"
    return "a finite number" if name in SCALES and not _number(value) else ""


def _bounds(name: str) -> tuple[int, int] | None:
    if name in LAYERS:
        return 1, MOST.layers
    if name in EXPERTS:
        return 0, MOST.experts
    if name in TOP_K:
        return 1, MOST.experts
    if name in CONTEXT:
        return 2, MOST.tokens
    if name == "vocab_size":
        return 1, MOST.vocabulary
    if name in FULL or name in PARTIAL:
        return int(name in FULL), MOST.width
    return None


def _chosen(config: Mapping[str, Any]) -> str:
    """The problem with a top-k or a number of expert groups that exceeds what exists, or ""."""
    stated = [name for name in EXPERTS if type(config.get(name)) is int and config[name] > 0]
    experts = stated[0] if stated else None
    if other := next((name for name in stated[1:] if config[name] != config[stated[0]]), None):
        return f"{stated[0]} is {config[stated[0]]}, but its {other} is {config[other]}"
    chosen = next((n for n in TOP_K if type(config.get(n)) is int), None)
    if experts and chosen and config[chosen] > config[experts]:
        return f"{chosen} is {config[chosen]}, but there are only {config[experts]} experts ({experts})"
    groups, of = config.get("topk_group"), config.get("n_group")
    if type(groups) is int and type(of) is int and of > 0 and not 1 <= groups <= of:
        return f"topk_group is {groups}, but there are {of} groups (n_group)"
    if type(of) is int and experts and of > 0 and config[experts] % of:
        return f"n_group is {of}, which does not divide {config[experts]} experts"
    return ""


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
