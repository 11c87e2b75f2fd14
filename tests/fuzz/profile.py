"""Profiles: the JSON in the head, arrays and checksum; read, described, and asked for what settings need."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from core.errors import SettingError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.slot_allocation import check_needs, place
from core.profile import Profile, load, save
from core.profile.file import SUM, checksum
from core.profile.profile import KEY
from core.profile.summary import describe
from core.settings.config import Settings, params
from tests.fake_models import SHAPE
from tests.fake_profiles import fake_profile
from tests.fuzz.changes import Change, Gone, act, change_array, owner_of
from tests.fuzz.draw import DEPTH, byte_change, drawn, file_change, header_bytes, json_path, value_near
from tests.fuzz.mutant import Mutant

FILE = "p.safetensors"


@act("profile")
def change_profile(file: Path, change: Mapping[str, Any]) -> None:
    """What a profile says, or an array of it, changed, and the checksum made anew."""
    try:
        with safe_open(file, framework="numpy") as opened:
            said = json.loads((opened.metadata() or {})[KEY])
            arrays = {name: opened.get_tensor(name) for name in names_of(opened)}
    except Exception:
        raise Gone from None
    text = ""
    if "array" in change:
        change_array(arrays, change["array"], change)
    elif "depth" in change:
        text = "[" * change["depth"]
    else:
        owner, key = owner_of(said, change["at"]), change["at"][-1]
        if change["raw"] is None:
            del owner[key]
        else:
            owner[key] = json.loads(change["raw"])
    text = text or json.dumps(said)
    save_file(arrays, file, {KEY: text, SUM: checksum(text, arrays)})


def names_of(opened: Any) -> list[str]:
    """The tensors of an open safetensors file, which is no mapping."""
    return sorted(opened.keys())


class Profiles:
    """A profile that is taken must serve everything that asks for one, or say in words what it lacks."""

    name = "profile"
    samples = ("some", "all")

    def make(self, sample: str, folder: Path) -> None:
        profile = fake_profile(parts=("counts", "pairs", "tae", "gate_recall", "times"))
        save(profile if sample == "some" else whole(profile), folder / FILE)

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        return drawn(
            rng,
            (0.04, lambda: file_change(rng, FILE)),
            (0.10, lambda: byte_change(rng, folder, FILE, header_bytes(folder, FILE))),
            (0.10, lambda: byte_change(rng, folder, FILE)),
            (0.41, lambda: self._said(rng, folder)),
            (0.35, lambda: self._array(rng, folder)),
        )

    @staticmethod
    def _said(rng: Random, folder: Path) -> Change:
        with safe_open(folder / FILE, framework="numpy") as opened:
            said: Any = json.loads((opened.metadata() or {})[KEY])
        at, value = json_path(rng, said), said
        for key in at:
            value = value[key]
        if rng.random() < 0.05:
            return {"do": "profile", "file": FILE, "depth": DEPTH}
        raw = None if rng.random() < 0.15 else value_near(rng, value)
        return {"do": "profile", "file": FILE, "at": at, "raw": raw}

    @staticmethod
    def _array(rng: Random, folder: Path) -> Change:
        with safe_open(folder / FILE, framework="numpy") as opened:
            names = names_of(opened)
        return {
            "do": "profile",
            "file": FILE,
            "array": rng.choice(names),
            "at": rng.randrange(1000),
            "as": rng.choice(("drop", "shape", "type", "rename", "value", "value", "value")),
            "value": rng.choice(("nan", "inf", "-inf", -1, 1e30, 2**31, 7, 100)),
        }

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        profile = load(folder / FILE, model_hash="fake")
        seen: dict[str, Any] = {}
        for f in fields(Profile):
            value = getattr(profile, f.name)
            seen[f.name] = value if isinstance(value, np.ndarray | int | str) else str(value)
        seen["told"] = str(describe(profile))
        profile.over(fake_profile()), profile.parts()
        seen["placed"] = str(
            [
                _placed(kind, name, profile)
                for kind in ("eviction", "layer_slots", "predictor")
                for name in params()[kind].choices or ()
            ]
        )
        return seen

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        sealed = any(change["do"] == "profile" for change in mutant.changes)
        if not sealed:
            return "a change was not noticed" if any(str(seen.get(name)) != str(whole[name]) for name in whole) else ""
        for name, value in seen.items():
            if (
                isinstance(value, np.ndarray)
                and value.dtype.kind == "f"
                and name not in ("gate_recall", "defaults")
                and not np.isfinite(value).all()
            ):
                return f"{name} is not finite"
        if "counts" in seen and isinstance(seen["counts"], np.ndarray) and (seen["counts"] < 0).any():
            return "counts below 0"
        return ""


def _placed(kind: str, name: str, profile: Profile) -> str:
    """What a setting makes of a profile, or why it cannot be chosen."""
    try:
        settings = Settings({kind: name})
        check_needs(settings, profile)
        placed = place(settings.cache, SHAPE.layers, SHAPE.experts, SHAPE.top_k, profile)
        return str(list(placed.divide(20))) if str(settings["scope"]) == "layer" else ""
    except SettingError as error:
        return str(error)


def whole(some: Profile) -> Profile:
    """Every part that a profile can have."""
    from dataclasses import replace

    import torch

    rng, s = np.random.default_rng(1), SHAPE

    def numbers(*shape: int, dtype: str = "float32") -> Any:
        return rng.random(shape).astype(dtype)

    return replace(
        some,
        defaults=numbers(s.layers, s.experts, s.hidden, dtype="float16"),
        maps=numbers(3, s.layers, s.experts, dtype="float16"),
        map_keys=numbers(3, s.hidden, dtype="float16"),
        norms=numbers(s.layers, s.experts),
        peaks=numbers(s.layers, s.experts),
        likeness=numbers(s.layers, s.experts, s.experts, dtype="float16"),
        curve_hit=numbers(s.layers, s.experts + 1),
        curve_chosen=numbers(s.layers, 3),
        curve_cached=numbers(s.layers, s.experts + 1, 3),
        plan=CachePlan((1.5,) * s.layers, (3,) * s.layers, (0.5,) * s.layers, (0.1,) * s.layers, 2.0, 1),
        nets={"estimator.a": torch.from_numpy(numbers(3, 4)), "path.tokens": torch.tensor([5, 6])},
        settings={
            "estimator": {"width": 4},
            "path": {"d_model": 2},
            "times": {"link": "emulated"},
            "curves": {"tokens": 10, "eviction": "lcp"},
            "gathered": {"counts": {"tokens": 10}},
        },
    )
