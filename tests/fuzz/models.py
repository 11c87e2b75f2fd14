"""Tiny models, what Moestro makes of them, and what plain transformers does."""

import contextlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from core.hf.cached_pass import cached_pass
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import make_checkpoint
from tests.loaded import loaded
from tests.tiny_tokenizer import save_tokenizer

SMALL = dict(
    num_hidden_layers=2,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=32,
    moe_intermediate_size=32,
    max_position_embeddings=128,
)
SAMPLES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(num_experts=4, num_experts_per_tok=2),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss": dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    "deepseek_v3": dict(
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        head_dim=None,
        kv_lora_rank=16,
        q_lora_rank=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        num_hidden_layers=3,
    ),
}
PROMPT, STEPS = (3, 5, 7, 11, 2, 4), 2
CHAT = [{"role": "user", "content": "the cat"}]
LAYERS = ("num_hidden_layers", "num_layers")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def make_model(arch: str, folder: Path) -> Path:
    """A checkpoint in two shards with a tokenizer."""
    return save_tokenizer(make_checkpoint(arch, folder, max_shard_size="100KB", **SMALL | SAMPLES[arch]))


def seen_with_head(folder: Path) -> dict[str, Any]:
    """The same of a pack whose head's guesses are verified."""
    return seen_of(folder, "fast", drafts="mtp")


def seen_of(folder: Path, arithmetic: str = "auto", **settings: Any) -> dict[str, Any]:
    """Load a folder (checkpoint or pack) as a user would, compute some tokens, chat once, unload."""
    with loaded(folder, {"budget": "50%", **settings}, threads=1, arithmetic=arithmetic) as engine:
        rows: list[torch.Tensor] = []

        def draw(ids: Sequence[int], logits: torch.Tensor) -> int:
            rows.append(logits[0].float().clone())
            return min(8 + len(rows), logits.shape[-1] - 1)

        for _ in engine.generate(Ids(PROMPT), Sampling(max_new_tokens=STEPS + 1), draw=draw):
            pass
        said = "".join(p.text for p in engine.generate(CHAT, Sampling(max_new_tokens=3)) if p.kind == "token")
        return {
            "logits": torch.stack(rows[: STEPS + 1]).numpy(),
            "dtype": str(engine.model.dtype),
            "arithmetic": engine.arithmetic.name,
            "chat ids": engine.prompt.tokens(CHAT),
            "ends": sorted(engine.prompt.ends),
            "said": said,
        }


@torch.inference_mode()
def plain_logits(folder: Path, dtype: str) -> tuple[Any, str]:
    """(what plain transformers computes in a number type, "") or (None, why it does not)."""
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype.removeprefix("torch.")),
            experts_implementation="grouped_mm",
            local_files_only=True,
            output_loading_info=True,
        )
        lost = [*info["missing_keys"], *info["mismatched_keys"]]
        if lost:
            return None, f"transformers finds no weights for {len(lost)} of them, such as {sorted(map(str, lost))[0]}"
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        cache, ids, rows = DynamicCache(config=model.eval().config), torch.tensor([PROMPT]), []
        for step in range(STEPS + 1):
            logits = cached_pass(model, ids, cache, logits_to_keep=1).logits[0, -1]
            rows.append(logits.float().clone())
            ids = torch.tensor([[min(9 + step, logits.shape[-1] - 1)]])
        return torch.stack(rows).numpy(), ""
    except (Exception, SystemExit) as error:
        return None, f"transformers refuses it ({type(error).__name__}: {str(error)[:200]})"


def differs(folder: Path, seen: dict[str, Any], plain: Any) -> str:
    """How what was seen of a folder differs from what plain transformers computes, "" if in no bit: the reference
    arithmetic has the same bits."""
    ours = seen["logits"] if seen["arithmetic"] == "reference" else seen_of(folder, "reference")["logits"]
    same = plain.shape == ours.shape and np.array_equal(plain, ours, equal_nan=True)
    return "" if same else "transformers computes other logits"


def plain_chat(folder: Path) -> list[int] | None:
    """The ids of the chat by transformers' own tokenizer, None where it fails."""
    with contextlib.suppress(Exception):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if tokenizer.chat_template is None:
            return None
        text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
        return list(tokenizer(text, add_special_tokens=False).input_ids)
    return None


def contradiction(folder: Path) -> str:
    """Whether a config says fewer layers or experts than the tensors beside it have, and what; "" if it does not."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        names: list[str] = []
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="np") as opened:
                names += opened.keys()
    except Exception:
        return ""
    for what, keys in (("layers", LAYERS), ("experts", EXPERTS)):
        found = [int(m[1]) for name in names if (m := re.search(rf"\b{what}\.(\d+)\.", name))]
        said = next((config[key] for key in keys if key in config), None)
        if found and type(said) is int and said <= max(found):
            return f"config.json says {said} {what}, the tensors have {max(found) + 1}"
    return ""


def finite(seen: dict[str, Any]) -> bool:
    return bool(np.isfinite(seen["logits"]).all())
