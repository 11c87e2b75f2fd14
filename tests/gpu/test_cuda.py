"""The CUDA path: the tokens of transformers, bytes within the budget, profiles and choices as on a CPU, and doctor."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from app.services import probes
from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.hf.quantized_linear import QuantizedLinear
from core.measure.calibrate.gather import calibrate
from core.memory.link import measure_gbps
from core.policy.substitute import batch, plain
from core.profile import PARTS, Profile
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import create, variants
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.equality.passes import PROMPT
from tests.loaded import loaded, unloading
from tests.policy.substitutes import LAYERS, drawn, gates
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("cuda_model")))


@torch.inference_mode()
def logits(model: object, cache: object, steps: int = 12) -> torch.Tensor:
    ids, out = torch.tensor([PROMPT], device=DEVICE), []
    for _ in range(steps + 1):
        last = cached_pass(model, ids, cache).logits[0]  # type: ignore[operator]
        out.append(last)
        ids = last[-1:].argmax(-1)[None]
    return torch.cat(out)


@pytest.mark.parametrize("predictor", ["none", "gate"])
@pytest.mark.parametrize("eviction", ["lru", "lfu", "none"])
def test_logits_agree_with_transformers(model: Path, eviction: str, predictor: str) -> None:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="grouped_mm")
    plain = plain.to(DEVICE).eval()
    want = logits(plain, DynamicCache(config=plain.config))
    settings = Settings({"budget": "50%", "eviction": eviction, "predictor": predictor})
    with unloading(Engine.load(LoadSpec.checked(str(model), settings, dtype="float32", device="cuda"))) as engine:
        got = logits(engine.model, engine.fresh_cache())
        engine.expert_cache.check_integrity()
        # another kernel computes the grouped product on CUDA: equal up to its rounding, not bit for bit
        assert (got - want).abs().max().item() <= 1e-4
        assert (got.argmax(-1) == want.argmax(-1)).all()


def test_memory_stays_within_the_budget_and_figures_add_up(model: Path) -> None:
    with loaded(model, {"budget": "50%"}, device="cuda") as engine:
        pieces = list(engine.generate("hello", Sampling(max_new_tokens=32)))
        steps = [p.step for p in pieces if p.step is not None]
        assert all(s.device_bytes <= s.budget_bytes for s in steps)
        assert all(abs(s.compute_ms + s.stall_ms + s.idle_ms - s.total_ms) < 1e-6 for s in steps)
        copies = [t for s in steps for t in s.transfers]
        assert copies
        assert all(t.ended_s > t.started_s for t in copies)
        engine.change({"budget": "all"})
        list(engine.generate("hello", Sampling(max_new_tokens=8)))
        engine.expert_cache.check_integrity()


def test_pinned_copies_have_a_speed() -> None:
    assert measure_gbps(DEVICE) > 0.5


@pytest.mark.parametrize("format", ["int4-g32", "int8-g32"])
def test_rounded_dense_layers_compute_with_what_their_codes_stand_for(model: Path, format: str) -> None:
    with loaded(model, {"budget": "50%"}, dtype="float32", device="cuda", dense=format) as engine:
        plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, experts_implementation="grouped_mm")
        for name, module in engine.model.named_modules():
            if isinstance(module, QuantizedLinear):
                plain.get_submodule(name).weight.data.copy_(module.weight)
        want = logits(plain.to(DEVICE).eval(), DynamicCache(config=plain.config))
        assert (logits(engine.model, engine.fresh_cache()) - want).abs().max().item() <= 1e-3


def test_what_is_said_of_it() -> None:
    gpu = probes.gpus()[0]
    assert gpu["usable"] and gpu["total_bytes"] >= gpu["free_bytes"] > 0
    assert probes.link(5, 64 * probes.MB)["gbps"] > 1


def test_its_slot_in_the_machine() -> None:
    pytest.importorskip("pynvml")
    assert probes.gpus()[0]["pcie"]["width_max"] > 0


TEXTS = ["The same text is read on either device.", "And another one, of some more words than the first one has."]


def test_a_profile_of_either_device_is_the_same(tmp_path: Path) -> None:
    model, found = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "model")), list[Profile]()
    for device in ("cpu", "cuda"):
        with loaded(model, {"budget": "50%"}, device=device, dtype="float32", context=128) as engine:
            found.append(calibrate(engine, TEXTS, parts=set(PARTS) - {"path"}))
            engine.expert_cache.check_integrity()
    cpu, cuda = found
    assert cpu.tokens == cuda.tokens and cpu.parts() == cuda.parts()
    assert cpu.counts is not None and cuda.counts is not None
    assert np.abs(cpu.counts - cuda.counts).sum() <= 0.02 * cpu.counts.sum()  # near ties may fall the other way
    for name in ("defaults", "maps", "map_keys"):
        one, other = (getattr(profile, name).astype(np.float32) for profile in found)
        assert np.linalg.norm(one - other) <= 0.05 * np.linalg.norm(one)
    assert cuda.times is not None and all(value > 0 for value in cuda.times.values())
    said = cuda.settings["times"]
    assert isinstance(said, dict) and said["all_resident"]


@pytest.mark.parametrize("name", [v.name for v in variants("substitute")])
def test_a_gpu_chooses_as_algorithm_1_does(name: str) -> None:
    cuda = torch.device("cuda")
    for seed in range(40):
        question, known, _ = drawn(seed, 64, 16, 4)
        rules, here = gates(seed + 1, 16), {}
        for device in (torch.device("cpu"), cuda):
            substitute = create("substitute", name, {})
            substitute.prepare(known, LAYERS, 16, device)
            there = {f.name: getattr(question, f.name) for f in fields(question)}
            asked = replace(question, **{n: t.to(device) for n, t in there.items() if isinstance(t, torch.Tensor)})
            protected = None if rules.protected is None else rules.protected.to(device)
            select = batch.select if device.type == "cuda" else plain.select
            here[device.type] = select(asked, replace(rules, protected=protected), substitute)
        one, many = here["cpu"], here["cuda"]
        for name_ in ("ids", "action", "why"):
            assert torch.equal(getattr(one, name_), getattr(many, name_).cpu()), (seed, name_)
        assert one.delta == many.delta and many.ids.device.type == "cuda"
