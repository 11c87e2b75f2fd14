"""Passes in the fast arithmetic, read in pieces and along with others, and how far they are from the reference."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import torch

from core.engine import Engine
from core.runtime.batch import Batch, Share
from core.runtime.pipeline import Pipeline
from core.runtime.sequence_kv import SequenceKV
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.equality.passes import PROMPT
from tests.loaded import unloading
from tests.mtp_checkpoint import MIMO_CONFIG

CLOSE = 1e-4  # of the largest logit: fp32 sums in another order
OTHERS = [[5] * 9, [9, 8, 7], [11]]  # of a batch

YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.0
)
KNOWN: dict[str, dict[str, object]] = {  # what the program computes
    "qwen3_moe": {},
    "mixtral": {},
    "qwen2_moe": dict(mlp_only_layers=[1]),
    "olmoe": dict(norm_topk_prob=True, attention_bias=True),
    "glm4_moe": dict(n_group=2, use_qk_norm=True, attention_bias=True, routed_scaling_factor=1.5),
    "dots1": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": dict(attention_bias=True),
    "minimax_m2": {},
    "hy_v3": dict(router_scaling_factor=1.5),
    "sarvam_mla": {},
    "flex_olmo": {},
    "granitemoe": dict(
        embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=6.0, attention_multiplier=0.3
    ),
    "granitemoeshared": dict(residual_multiplier=0.22),
    "afmoe": dict(route_scale=1.5),
    "laguna": dict(moe_routed_scaling_factor=1.5),
    "gemma4_text": dict(
        hidden_size_per_layer_input=0, attention_k_eq_v=True, global_head_dim=32, final_logit_softcapping=30.0
    ),
    "deepseek_v2": {},
    "deepseek_v3": dict(attention_bias=True, rope_parameters=YARN),
    "glm4_moe_lite": dict(rope_interleave=False),
    "mimo_v2_flash": dict(MIMO_CONFIG, attention_value_scale=0.612),
}


def load(path: Path | str, **how: object) -> Engine:
    settings = Settings({"budget": "100%", "predictor": "none", "link": "own"})
    return Engine.load(LoadSpec.checked(str(path), settings, **{"arithmetic": "fast", "context": 128} | how))


def logits(
    engine: Engine, ids: Sequence[int], cuts: Sequence[int], others: Sequence[list[int]] = (), keep: int = 1
) -> torch.Tensor:
    """[keep, V] of the last ids, read in pieces, the last of them along with other texts."""
    wiring = engine.wiring
    pool, pipeline, at = wiring.pool, wiring.measuring, 0
    kvs = [pool.take(pool.context) for _ in range(1 + len(others))]
    try:
        for i, cut in enumerate(cuts):
            shares = [Share(ids[at : at + cut], kvs[0], 1)]
            if i == len(cuts) - 1:
                shares += [Share(one, kv, 2 + n) for n, (one, kv) in enumerate(zip(others, kvs[1:], strict=True))]
            batch = Batch("decode" if cut == 1 else "prefill", tuple(shares))
            pipeline.begin(batch)
            found = pipeline.forward(batch, keep)[:keep].clone()
            at += cut
        return found
    finally:
        pipeline.end()
        pool.clear()


def read(pipeline: Pipeline, kv: SequenceKV, ids: Sequence[int], *, breaks_off: bool = False) -> torch.Tensor:
    """The last logits of a pass, unless it breaks off in a later layer."""
    calls = itertools.count()
    pipeline.begin(batch := Batch("prefill", (Share(ids, kv, 1),)))
    try:
        return pipeline.forward(batch, 1, lambda: breaks_off and next(calls) == 2).clone()
    finally:
        pipeline.end()


def distance(path: Path, **how: object) -> float:
    """From the reference arithmetic with the same weights: the median of rows, as the choice may differ in a row with
    two experts of almost the same score."""
    found = []
    for arithmetic in ("fast", "reference"):
        settings = Settings({"predictor": "none"})
        with unloading(
            Engine.load(LoadSpec.checked(str(path), settings, arithmetic=arithmetic, dtype="bfloat16", **how))
        ) as engine:
            assert (engine.wiring.answering.hooked.program is not None) == (arithmetic == "fast")
            found.append(logits(engine, PROMPT, [len(PROMPT)], keep=len(PROMPT)).float())
    return float(((found[0] - found[1]).norm(dim=-1) / found[1].norm(dim=-1)).median())
