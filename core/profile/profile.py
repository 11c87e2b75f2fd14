"""A profile: everything that calibration measured of one model, in memory and on disk. Independent of the engine.

On disk it is one safetensors file: the arrays, and in its head one JSON text with the rest, and a checksum of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from core.errors import ProfileError
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.curves import Curves
from core.policy.substitute.entropy import TEMPERATURES
from core.profile.file import DAMAGED, error_text, read, write
from core.profile.sound import check_arrays, check_head, check_nets

if TYPE_CHECKING:
    from torch import Tensor

VERSION = 1
KEY = "moestro.profile"  # of the JSON text in the file's head
NET = "net."  # prefix of the names of trained weights in the file

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]


# Part -> its arrays. These names are used to gather, request and report parts.
PARTS: dict[str, tuple[str, ...]] = {
    "counts": ("counts",),
    "pairs": ("pairs", "pairs_weighted"),
    "defaults": ("defaults",),
    "gate_recall": ("gate_recall", "similarity", "default_recall"),
    "tae": ("tae", "tae_tempered"),
    "maps": ("maps", "map_keys"),
    "likeness": ("likeness",),
    "norms": ("norms",),
    "peaks": ("peaks",),
    "curves": ("curve_hit", "curve_chosen", "curve_cached"),
    "times": ("times",),
    "estimator": (),
    "path": (),
}
# Array -> (dtype in the file, its dimensions: L layers, E experts, C experts + 1, H hidden, - any).
ARRAYS: dict[str, tuple[str, str]] = {
    "counts": ("int64", "LE"),
    "pairs": ("float32", "LEE"),
    "pairs_weighted": ("float32", "LEE"),
    "defaults": ("float16", "LEH"),
    "gate_recall": ("float32", "L"),
    "similarity": ("float32", "l"),
    "default_recall": ("float32", "L"),
    "tae": ("float32", "LP"),
    "tae_tempered": ("float32", "LTP"),
    "maps": ("float16", "-LE"),
    "map_keys": ("float16", "-H"),
    "likeness": ("float16", "LEE"),
    "norms": ("float32", "LE"),
    "peaks": ("float32", "LE"),
    "curve_hit": ("float32", "LC"),
    "curve_chosen": ("float32", "L-"),
    "curve_cached": ("float32", "LC-"),
}


@dataclass(frozen=True, eq=False)
class Profile:
    """Measured on `tokens` tokens of `source`. An array is None where it was not gathered."""

    model: str
    model_hash: str
    layers: int
    experts: int
    top_k: int
    hidden: int
    tokens: int
    source: str  # in the user's words
    created: str  # ISO 8601
    counts: Ints | None = None  # int64 [L, E] tokens that chose the expert
    pairs: Floats | None = None  # float32 [L, E, E] tokens that chose both, a text's first ones less; diagonal 0
    pairs_weighted: Floats | None = None  # float32 [L, E, E] sum of the smaller of the two weights; diagonal 0
    defaults: Floats | None = None  # float16 [L, E, H] mean output of the expert, unweighted; 0 if unused
    gate_recall: Floats | None = None  # float32 [L] recall@k of router l asked with h_{l-1}; [0] is NaN
    similarity: Floats | None = None  # float32 [L-1] mean cosine of h_l and h_{l+1}
    default_recall: Floats | None = None  # float32 [L] as gate_recall, with quasi-hidden states in place of h
    tae: Floats | None = None  # float32 [L, 101] percentiles of the tokens' gate entropy ...
    tae_tempered: Floats | None = None  # float32 [L, 5, 101] ... and at TEMPERATURES; None in older profiles
    likeness: Floats | None = None  # float16 [L, E, E] mean cosine of two experts' outputs; diagonal 1
    norms: Floats | None = None  # float32 [L, E] mean norm of the expert's output; 0 if unused
    peaks: Floats | None = None  # float32 [L, E] largest absolute output of the expert, unweighted; 0 if unused
    maps: Floats | None = None  # float16 [N, L, E] router distributions of single tokens ...
    map_keys: Floats | None = None  # float16 [N, H] ... and the output of the embedding for them
    curve_hit: Floats | None = None  # float32 [L, E + 1] the arrays of core.policy.allocation.curves.Curves
    curve_chosen: Floats | None = None  # float32 [L, Y]
    curve_cached: Floats | None = None  # float32 [L, E + 1, Y]
    times: dict[str, float] | None = None  # ms: "att" and "moe" of one layer, "head", "load" of one expert
    nets: dict[str, Tensor] = field(default_factory=dict)  # weights "estimator.*" and "path.*"
    settings: dict[str, object] = field(default_factory=dict)  # the nets' configurations, and the basis of the times
    plan: CachePlan | None = None  # of the cache, made from what was measured

    def has(self, part: str) -> bool:
        """Whether a part (a name of PARTS) was gathered, or a "plan" made. Raises KeyError for any other name."""
        if part == "plan":
            return self.plan is not None
        names = PARTS[part]
        if not names:
            return any(name.startswith(f"{part}.") for name in self.nets)
        return getattr(self, names[0]) is not None

    def parts(self) -> tuple[str, ...]:
        """The gathered parts, by the names of PARTS and in their order."""
        return tuple(part for part in PARTS if self.has(part))

    def net(self, name: str) -> tuple[dict[str, int], dict[str, npt.NDArray[Any]]]:
        """A trained network's configuration, and its weights without their prefix. Raises KeyError if it was
        not trained."""
        config = self.settings[name]
        assert isinstance(config, Mapping)
        weights = {
            full.removeprefix(f"{name}."): one.numpy() for full, one in self.nets.items() if full.startswith(f"{name}.")
        }
        return {key: int(value) for key, value in config.items()}, weights

    def curves(self) -> Curves | None:
        """The statistics that a cache is planned from; None where they were not measured."""
        if self.curve_hit is None or self.curve_chosen is None or self.curve_cached is None:
            return None
        about = self.settings.get("curves")
        tokens = about.get("tokens") if isinstance(about, Mapping) else None
        arrays = (np.asarray(one, np.float64) for one in (self.curve_hit, self.curve_chosen, self.curve_cached))
        return Curves(self.top_k, tokens if isinstance(tokens, int) else self.tokens, *arrays)

    def over(self, old: Profile) -> Profile:
        """This profile, with missing parts taken from an older one of the same model."""
        check_model(old, self.model_hash, self.model)
        kept = [part for part in old.parts() if not self.has(part)]
        values = {name: getattr(old, name) for part in kept for name in PARTS[part]}
        nets = {name: value for name, value in old.nets.items() if name.partition(".")[0] in kept}
        settings = dict(self.settings)
        for name, own in old.settings.items():  # the settings of a kept part stay with it
            if name in kept:
                settings[name] = own
            elif name == "gathered" and isinstance(own, dict):
                mine = settings.get(name)
                settings[name] = {part: own[part] for part in kept if part in own} | (
                    mine if isinstance(mine, dict) else {}
                )
        values |= {} if self.tokens else {"tokens": old.tokens, "source": old.source}  # only times were measured
        values["plan"] = self.plan or old.plan
        return replace(self, **values, nets={**nets, **self.nets}, settings=settings)


def check_model(profile: Profile, model_hash: str, model: str = "") -> None:
    """Raises ProfileError, naming both models, when a profile is of another model."""
    if profile.model_hash != model_hash:
        raise ProfileError(
            f"This profile was measured on {profile.model} ({profile.model_hash[:12]}) and says nothing "
            f"about {model or 'this model'} ({model_hash[:12]}). Calibrate this model to get its own."
        )


def profile_path(data_dir: Path, model_hash: str) -> Path:
    """The path of a model's profile."""
    return data_dir / "profiles" / f"{model_hash[:16]}.safetensors"


def save(profile: Profile, path: Path) -> None:
    """Writes a profile atomically. Raises ProfileError, keeping the old file."""
    head = {f.name: getattr(profile, f.name) for f in fields(profile) if f.name in _PLAIN}
    if profile.plan is not None:
        head["plan"] = profile.plan.as_json()
    try:
        write(path, KEY, head, _arrays(profile), VERSION)
    except (OSError, SafetensorError) as error:
        raise ProfileError(
            f"The profile cannot be written to {path}: {error}. Make room, or check that the folder may be written to."
        ) from error


def load(path: Path, *, model_hash: str | None = None, model: str = "") -> Profile:
    """Reads a profile. Raises ProfileError when there is none, or it is damaged, of a later version, or of another
    model than `model_hash` (`model` = its name, for the message)."""
    if not path.is_file():
        raise ProfileError(f"There is no profile {path}. Calibrate the model first.")
    try:
        head, arrays = read(path, KEY, VERSION)
        profile = _profile(head, arrays)
    except DAMAGED as error:
        raise ProfileError(
            f"The profile {path} is damaged ({error_text(error)}). Calibrate the model again."
        ) from error
    if model_hash is not None:
        check_model(profile, model_hash, model)
    return profile


_PLAIN = (*"model model_hash layers experts top_k hidden tokens source created times settings".split(),)


def _arrays(profile: Profile) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, Any] = {name: getattr(profile, name) for name in ARRAYS}
    arrays = {name: np.ascontiguousarray(value, ARRAYS[name][0]) for name, value in found.items() if value is not None}
    nets = {
        NET + name: np.ascontiguousarray((value.float() if value.is_floating_point() else value).cpu().numpy())
        for name, value in profile.nets.items()
    }
    return arrays | nets


def _profile(head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> Profile:
    plain = {name: head[name] for name in _PLAIN}
    check_head(plain)
    sizes = {
        "L": plain["layers"],
        "l": plain["layers"] - 1,
        "E": plain["experts"],
        "C": plain["experts"] + 1,
        "H": plain["hidden"],
        "P": 101,
        "T": len(TEMPERATURES),
    }
    values: dict[str, Any] = {}
    for name in ARRAYS.keys() & arrays.keys():
        kind, sides = ARRAYS[name]
        values[name] = array = arrays[name]
        if (
            array.dtype != kind
            or array.ndim != len(sides)
            or any(side != "-" and array.shape[i] != sizes[side] for i, side in enumerate(sides))
        ):
            raise ValueError(f"{name} is {array.dtype} {list(array.shape)}")
    check_arrays(values)
    nets = [name.removeprefix(NET) for name in arrays if name.startswith(NET)]
    check_nets(plain["settings"], nets, defaults="defaults" in values)
    if head.get("plan") is not None:
        values["plan"] = CachePlan.from_json(head["plan"], plain["layers"], plain["experts"])
    return Profile(**plain, **values, nets=_nets(arrays))


def _nets(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    names = [name for name in arrays if name.startswith(NET)]
    if not names:
        return {}
    import torch  # here: reading counts needs no torch

    return {name.removeprefix(NET): torch.from_numpy(arrays[name].copy()) for name in names}
