"""Experts whose formats differ by layer on the emulated GPU: slots that are alike, and kernels of each codec."""

from pathlib import Path

import pytest
import torch

from core.hf.cached_pass import cached_pass
from core.memory.slabs import slot_cost
from tests.cuda.conftest import engine_on
from tests.decoded import answer
from tests.fake_cuda import FakeCuda
from tests.loaded import loaded
from tests.mixed_gguf import make_mixed

IDS = torch.randint(2, 40, (1, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mixed(tmp_path_factory.mktemp("mixed"))[1]


@pytest.fixture(scope="module")
def wanted(pack: Path) -> torch.Tensor:
    """A CPU's logits."""
    how = dict(arithmetic="reference", dtype="float32", context=64)
    with loaded(pack, {"predictor": "none"}, **how) as engine, torch.inference_mode():
        return cached_pass(engine.model, IDS, engine.fresh_cache()).logits[0].clone()


def test_a_gpu_has_slots_for_the_largest_and_kernels_for_each(
    wanted: torch.Tensor, fake_kernels: FakeCuda, pack: Path
) -> None:
    found = list[torch.Tensor]()
    for budget in ("all", "50%"):
        settings = {"budget": budget, "predictor": "none"}
        with engine_on(pack, settings, arithmetic="reference", dtype="float32") as engine, torch.inference_mode():
            codecs = engine.loaded.plan.codecs
            assert codecs.is_mixed and engine.sizes.of_layer == () and len(codecs.distinct) == 3
            assert engine.sizes.slot == slot_cost(codecs.slot_bytes)
            assert len({id(one.grouped._kernels) for one in engine.wiring.math if one.grouped is not None}) == 3
            engine.change({"scope": "global"})
            found.append(cached_pass(engine.model, IDS.to("cuda"), engine.fresh_cache()).logits[0].cpu())
            engine.expert_cache.check_integrity()
            assert engine.memory().peak <= engine.memory().budget
    assert torch.equal(*found) and (wanted - found[0]).norm() < 1e-4 * wanted.norm()


@pytest.mark.long(0.1)
def test_tokens_led_by_the_gpu(fake_kernels: FakeCuda, pack: Path) -> None:
    """Each layer's blobs are read where they lie in host memory."""
    found = []
    for decode in ("host", "device"):
        settings = {"budget": "50%", "predictor": "none", "gpu_decode": decode}
        with engine_on(pack, settings, arithmetic="reference", dtype="float32") as engine:
            found.append(answer(engine, 5, 0))
            assert (engine.parts.device_decode.step is not None) == (decode == "device")
            sizes = [codec.blob_bytes for codec in engine.loaded.plan.codecs]
    assert torch.equal(found[0].logits, found[1].logits) and len({*sizes}) == 3
    steps = [one for one in found[1].steps if one.phase == "decode"]
    assert sum(one.demand_bytes for one in steps) > 0
