"""Norms computed at once, as with `norms` = fused on a GPU: logits within the bound that is stated, in fp32. A norm in
double precision, rounded once, stands in for a GPU's kernel here: it differs from the models' own in the last bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from core.capacity.plan import FUSED_NORMS
from core.engine import Engine
from core.hf import fused_rmsnorm, hooks
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.checkpoints import ARCHITECTURES
from tests.equality.conftest import Reference
from tests.equality.passes import PROMPT, run
from tests.selection import layered

LAYER_NORMS = ("phimoe",)
FEW = ("gpt_oss",)


def rounded_once(x: torch.Tensor, shape: tuple[int, ...], weight: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """torch's rms_norm, to the last bit of fp64."""
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (normed if weight is None else normed * weight.double()).to(x.dtype)


@pytest.mark.parametrize(
    "reference", layered(list(ARCHITECTURES), quick=lambda arch: arch in FEW), indirect=["reference"]
)
def test_logits_are_within_the_bound(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    fused: list[nn.Module] = []

    def noted(model: nn.Module, norms: fused_rmsnorm.Norms) -> list[nn.Module]:
        fused.extend(fused_rmsnorm.fuse(model, norms))
        return fused

    monkeypatch.setattr(fused_rmsnorm, "DEVICE", "cpu")
    monkeypatch.setattr(fused_rmsnorm, "rms_norm", rounded_once)
    monkeypatch.setattr(hooks, "patch_rmsnorms", lambda model: [])
    monkeypatch.setattr(hooks, "fuse", noted)
    spec = LoadSpec.checked(str(reference.path), Settings({"budget": "all"}), dtype="float32", norms="fused")
    engine = Engine.load(spec)
    try:
        logits, _ = run(engine.model, engine.fresh_cache(), lambda step: None)
        assert fused or reference.arch in LAYER_NORMS
        wanted = reference.logits[: len(PROMPT)]
        off = float((logits[: len(PROMPT)] - wanted).abs().max() / wanted.abs().max())
        print(f"{len(fused)} norms, {off:.1e}")
        assert off < FUSED_NORMS
    finally:
        engine.unload()


@pytest.mark.parametrize("reference", ["qwen3_moe"], indirect=True)
def test_it_is_said(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    from core.capacity import plan as plans
    from core.capacity.plan import plan

    spec = LoadSpec.checked(str(reference.path), Settings(), dtype="float32", norms="fused")
    assert "Norms computed at once" not in plan(spec).note, "nothing changes on a CPU"
    monkeypatch.setattr(plans, "choose_device", lambda name: torch.device("cuda"))
    found = plan(spec)
    assert "Norms computed at once" in found.note and found.closeness >= FUSED_NORMS
