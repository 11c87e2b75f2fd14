"""The fast arithmetic on the emulated GPU: what is bound of a model there, and what says that it does not compute.

That it has a CPU's bits is tried under Triton's interpreter (tests/memory/test_interpreted.py)."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.hf.discover import ExpertsSite
from core.hf.quantized_linear import QuantizedLinear
from core.runtime.batch import Batch, Share
from core.runtime.program.bind import bind
from core.runtime.program.gpu.experts import GpuExperts, Where
from core.runtime.program.gpu.host_copies import HostCopies
from core.runtime.program.gpu.program import GpuProgram
from core.runtime.program.gpu.recorder import Recorder
from core.runtime.program.gpu.rows import GpuMath, gpu_experts
from core.runtime.program.trial import Angles
from core.runtime.program.weights import NormWeight, Weight
from core.system.native.compile import supported
from tests.checkpoints import make_checkpoint
from tests.cuda.conftest import engine_on
from tests.fake_cuda import FakeCuda
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.skipif(not supported(), reason="no kernels for this CPU")
SETTINGS: Mapping[str, object] = {"budget": "all", "predictor": "none"}
CONTEXT = 64


def tensors(one: Any) -> list[torch.Tensor]:
    """What a form computes with, but for its embeddings: tensors, and the numbers of weights and norms."""
    if isinstance(one, torch.Tensor):
        return [one]
    if isinstance(one, (torch.nn.Module, ExpertsSite)):
        return []
    if isinstance(one, Angles):
        return [one.cos, one.sin]
    if isinstance(one, Weight):
        owner = one.owner
        if type(owner) is QuantizedLinear:
            assert one.slot == owner.address
            return [owner._raw, *tensors(one.bias)]
        weight = owner.weight if isinstance(owner, torch.nn.Linear) else owner
        assert isinstance(weight, torch.Tensor) and one.slot == weight.data_ptr()
        return [weight, *tensors(one.bias)]
    if isinstance(one, NormWeight):
        assert isinstance(one.owner, torch.Tensor) and one.at == one.owner.data_ptr()
        return [one.owner]
    if is_dataclass(one) and not isinstance(one, type):
        return [tensor for field in fields(one) for tensor in tensors(getattr(one, field.name))]
    if isinstance(one, tuple):
        return [tensor for part in one for tensor in tensors(part)]
    return []


@pytest.mark.parametrize("arch", ["qwen2_moe", "gpt_oss", "qwen3_next", "deepseek_v2"])
def test_what_is_bound_is_where_the_model_is(fake_cuda: FakeCuda, arch: str, tmp_path: Path) -> None:
    """Shared experts, biases and sinks, gates, delta nets and latents: every matrix and number is the model's own, or
    made of it, on its device."""
    layers = {"layer_types": ["linear_attention", "full_attention"]} if arch == "qwen3_next" else {}
    path = save_tokenizer(make_checkpoint(arch, tmp_path, attention_bias=True, num_hidden_layers=2, **layers))
    with engine_on(path, SETTINGS, arithmetic="reference") as engine:
        before = fake_cuda.memory.allocated
        form = bind(engine.model, engine.loaded.sites, CONTEXT, HostCopies(engine.loaded.device))
        assert fake_cuda.memory.allocated - before < 1 << 20  # tables of angles, and biases put together
        found = tensors((form.layers, form.norm))
        assert len(found) > 9 * len(form.layers)
        assert all(map(fake_cuda.tensors.on_device, found))
        recorder = Recorder()
        program, _ = bound(engine, recorder)
        assert program.form.parts == form.parts and not recorder.launched


def fallback(engine: Engine) -> str:
    assert engine.arithmetic.name == "reference" and not isinstance(engine.wiring.math[0], GpuMath)
    return engine.arithmetic.fallback


def test_it_has_to_be_chosen_by_name(fake_cuda: FakeCuda, model: Path) -> None:
    with engine_on(model, SETTINGS, arithmetic="auto") as engine:
        assert "has to be chosen by name" in fallback(engine)


def test_without_kernels_the_reference_computes_and_says_why(fake_cuda: FakeCuda, model: Path) -> None:
    with engine_on(model, SETTINGS, arithmetic="fast") as engine:
        assert fallback(engine) == "the fast arithmetic's kernels cannot run on this GPU: the GPU is not a real one"
        assert "never measured" in engine.loaded.plan.note


def bound(engine: Engine, recorder: Recorder) -> tuple[GpuProgram, list[GpuExperts]]:
    """The program of a model, and its experts, whose kernels a recorder gets."""
    loaded = engine.loaded
    sites, codecs = loaded.sites, loaded.plan.codecs
    experts = [gpu_experts(one.module, codec, recorder) for one, codec in zip(sites, codecs, strict=True)]
    return GpuProgram(engine.model, sites, CONTEXT, loaded.device, recorder, experts), experts


BEFORE, ATTENDED = ["_rms", "_joined"], ["_score", "_add_values"]
ROUTED, EXPERTS = ["_joined_normed", "_joined_routed"], ["_product", "_down"]
SHARED = ["_joined", "_activate", "_joined", "_joined", "_combine"]
GROUPED = [*BEFORE, "_rotate", *ATTENDED, *ROUTED, *EXPERTS]
CODES = {"format": "int4-g32", "dense": "int4-g32", "dtype": "bfloat16"}
LAUNCHED: dict[str, tuple[dict[str, object], list[list[str]]]] = {  # by layer
    "qwen3_moe": ({}, [GROUPED] * 2),
    "qwen3_moe in codes": ({"moe_intermediate_size": 32}, [[*GROUPED[:5], "_prepare", *GROUPED[5:]]] * 2),
    "qwen3_next": (
        {"layer_types": ["linear_attention", "full_attention"]},
        [
            [*BEFORE, "_convolve", "_inputs", "_rule", "_gated_heads", *ROUTED, *EXPERTS, *SHARED],
            [*BEFORE, "_rotate", *ATTENDED, "_gated_heads", *ROUTED, *EXPERTS, *SHARED],
        ],
    ),
    "deepseek_v2": (
        {"q_lora_rank": None, "first_k_dense_replace": 1},
        [
            [
                *BEFORE,
                "_latent",
                "_queries",
                *ATTENDED,
                "_values",
                "_joined_normed",
                "_joined",
                "_activate",
                "_joined",
            ],
            [*BEFORE, "_latent", "_queries", *ATTENDED, "_values", *ROUTED, *EXPERTS, *SHARED[:3], "_combine"],
        ],
    ),
}


@pytest.mark.parametrize("arch", LAUNCHED)
def test_what_is_launched_for_a_token(
    fake_cuda: FakeCuda, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So many kernels a layer, two at the end, and no wait for the device."""
    fields, layers = LAUNCHED[arch]
    monkeypatch.setattr("core.hf.quantized_linear.available", lambda device: True)
    name, _, coded = arch.partition(" ")
    path = save_tokenizer(make_checkpoint(name, tmp_path, num_hidden_layers=2, **fields))
    with engine_on(path, SETTINGS, arithmetic="reference", **(CODES if coded else {})) as engine:
        recorder = Recorder()
        program, experts = bound(engine, recorder)
        table = torch.zeros(engine.loaded.sites[0].num_experts, dtype=torch.int64, device="cuda")

        def compute(site: ExpertsSite, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return experts[site.index].token(Where(table=table, ids=ids[0]), x, weights[0])

        kv = engine.wiring.pool.take(CONTEXT)
        with fake_cuda.noting_waits() as waits:
            logits = program.compute(Batch("decode", (Share([5], kv, 1),)), 1, compute)
        assert logits.shape == (1, program.form.head.outputs) and kv.length == 1 and not waits
        names = [kernel.__name__ for kernel, _, _ in recorder.launched]
        assert names == [name for layer in layers for name in layer] + ["_rms", "_joined"]
        engine.wiring.pool.clear()
