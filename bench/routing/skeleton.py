"""A large MoE model without its experts, with random weights, to measure the cost of predictors in it."""

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, DynamicCache

from bench.harness.engines import until_ready
from bench.routing.probe import PredictorProbe, Predictors
from core.hf.cached_pass import cached_pass
from core.hf.discover import ExpertsSite, find_experts
from core.hf.hooks import install
from core.hf.skeleton import load_skeleton, meta_skeleton
from core.policy.predict.nets import estimator, path
from core.policy.predict.nets.estimator import Estimator
from core.policy.predict.nets.path import RoutingPathNet
from core.profile import FirstTable, Profile
from core.runtime.prediction.predictor_host import PredictorHost
from core.types import ModelShape

PROMPT, MAPS = 16, 1000
WIDTH = 256  # of the estimator, as trained


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model like Qwen3-30B-A3B, with small attention and vocabulary."""

    layers: int = 48
    experts: int = 128
    top_k: int = 8
    hidden: int = 2048
    vocabulary: int = 4096


LARGE, TINY = Sizes(), Sizes(3, 8, 2, 64, 256)


def measure(sizes: Sizes, subjects: Predictors, tokens: int, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """Milliseconds per decoded token that each of `subjects` takes on the computing thread, wall and cpu. One thread,
    as decoding is fastest in a model of many small products."""
    threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        model = load_skeleton(write(sizes, Path(folder)))
    sites = find_experts(model)
    profile = drawn_profile(sizes)
    predictor_host = PredictorHost(model, sites, ModelShape(sizes.layers, sizes.experts, sizes.top_k, sizes.hidden, 0))
    found: dict[str, dict[str, float]] = {}
    torch.set_num_threads(1)
    try:
        for title, (name, params) in subjects.items():
            say(f"{title}, {sizes.layers} layers of {sizes.experts} experts")
            predictor_host.use(name, params, profile)
            until_ready(predictor_host.predictor)
            probe = predictor_host.predictor = PredictorProbe(predictor_host.predictor, patient=False)
            _decode(model, sites, predictor_host, tokens, sizes.vocabulary)
            found[title] = probe.ms_per_token()
    finally:
        predictor_host.close()
        torch.set_num_threads(threads)
    return found


@torch.inference_mode()
def _decode(model: Any, sites: list[ExpertsSite], predictor_host: PredictorHost, tokens: int, vocabulary: int) -> None:
    def experts(site: ExpertsSite, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        predictor_host.predict(site.index, ids.tolist(), weights)
        return hidden

    random = np.random.default_rng(0)
    cache = DynamicCache(config=model.config)
    request = predictor_host.request + 1
    with install(model, sites, experts):
        for count in (PROMPT, *[1] * tokens):
            ids = random.integers(vocabulary, size=count).tolist()
            predictor_host.begin([(request, ids)])
            predictor_host.predict_first()
            cached_pass(model, torch.tensor([ids]), cache, logits_to_keep=1)


def write(sizes: Sizes, folder: Path) -> Path:
    """Writes a checkpoint of everything but the experts."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.top_k,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    described = {**config.to_dict(), "architectures": ["Qwen3MoeForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(described), encoding="utf-8")
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, folder / "model.safetensors")  # makes the folder a model
    generator = torch.Generator().manual_seed(0)
    meta = meta_skeleton(folder)
    experts = {f"{site.name}.{part}" for site in find_experts(meta) for part in site.parts}
    weights = {
        name: torch.ones(p.shape) if p.dim() == 1 else torch.randn(p.shape, generator=generator) * 0.05
        for name, p in meta.named_parameters()
        if name not in experts
    }
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def drawn_profile(sizes: Sizes) -> Profile:
    """A random profile with every part that predictors need, in the shapes of calibration."""
    random = np.random.default_rng(0)
    layers, experts, hidden = sizes.layers, sizes.experts, sizes.hidden
    tokens = np.arange(sizes.vocabulary, dtype=np.int32)
    guessing, one = estimator.to_tensors(Estimator(layers, experts, hidden, WIDTH))
    walking, two = path.to_tensors(RoutingPathNet(layers, experts, torch.arange(sizes.vocabulary)))
    return Profile(
        "drawn",
        "",
        layers,
        experts,
        sizes.top_k,
        hidden,
        0,
        "drawn",
        "",
        defaults=random.standard_normal((layers, experts, hidden), np.float32).astype(np.float16),
        gate_recall=np.array([np.nan, *([0.7, 0.9] * layers)[: layers - 1]], np.float32),
        maps=random.dirichlet(np.full(experts, 0.1), (MAPS, layers)).astype(np.float16),
        map_keys=random.standard_normal((MAPS, hidden), np.float32).astype(np.float16),
        first_table=FirstTable(tokens, random.integers(experts, size=(len(tokens), sizes.top_k)).astype(np.int16)),
        nets={**guessing, **walking},
        settings={**one, **two},
    )
