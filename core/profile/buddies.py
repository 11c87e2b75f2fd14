"""Buddy lists stored with a pack: each expert's co-activated peers, so that buddies can be substituted on a machine
where the model was never calibrated (BuddyMoE section 3.4).

One safetensors file beside the pack's own, built like a profile's (core.profile.profile). It holds each expert's peers
in order, with their counts, up to 64 and a coverage of 1: the list for any setting is a prefix of these."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError

from core.errors import ProfileError
from core.memory.pack.contents import BUDDIES
from core.policy.substitute.buddies import MOST, BuddyTable, rank, spread
from core.profile.file import DAMAGED, error_text, read, write
from core.profile.profile import Profile

NAME = BUDDIES
KEY = "moestro.buddies"  # of the JSON text in the file's head
VERSION = 1
TYPES = {"peers": "int16", "together": "float32", "whole": "float32"}
_PLAIN = ("model", "model_hash", "layers", "experts", "top_k", "hidden", "tokens", "source", "created")


def save(profile: Profile, path: Path) -> None:
    """Writes the lists of a profile that has part pairs, atomically. Raises ProfileError, keeping the old file."""
    if profile.pairs is None:
        raise ProfileError(
            f"The profile of {profile.model} does not say which experts are chosen together. Calibrate "
            "the model again, with the part pairs."
        )
    arrays = _named(rank(profile.pairs), "")
    if profile.pairs_weighted is not None:
        arrays |= _named(rank(profile.pairs_weighted), "_weighted")
    head = {name: getattr(profile, name) for name in _PLAIN}
    try:
        write(path, KEY, {**head, "alpha": 1.0, "k_max": MOST}, arrays, VERSION)
    except (OSError, SafetensorError) as error:
        raise ProfileError(
            f"The buddy lists cannot be written to {path}: {error}. Check that the folder may be "
            "written to; the profile itself is kept elsewhere."
        ) from error


def load(path: Path, *, model_hash: str | None = None, model: str = "") -> Profile:
    """Reads the lists as a profile that has only part pairs. Raises ProfileError when there is no file, or it is
    damaged, of a later version, or of another model than `model_hash` (`model` = its name, for the message)."""
    if not path.is_file():
        raise ProfileError(f"There are no buddy lists {path}. Calibrate the model first.")
    try:
        head, arrays = read(path, KEY, VERSION)
        found = _profile(head, arrays)
    except DAMAGED as error:
        raise ProfileError(
            f"The buddy lists {path} are damaged ({error_text(error)}). Delete the file, or calibrate the model again."
        ) from error
    if model_hash is not None and found.model_hash != model_hash:
        raise ProfileError(
            f"The buddy lists {path} were made for {found.model} ({found.model_hash[:12]}) and say nothing about "
            f"{model or 'this model'} ({model_hash[:12]}). Delete the file, or calibrate this model."
        )
    return found


def find(profile: Profile | None, pack: Path | None, model_hash: str, model: str = "") -> Profile | None:
    """A model's profile completed by its pack: `profile` unchanged when it has part pairs, else with that part from the
    lists in the directory `pack`, if there are any. None when there is neither.

    Raises ProfileError when the lists are damaged or of another model."""
    if pack is None or (profile is not None and profile.has("pairs")) or not (pack / NAME).is_file():
        return profile
    lists = load(pack / NAME, model_hash=model_hash, model=model)
    if profile is None:
        return lists
    return replace(profile, pairs=lists.pairs, pairs_weighted=lists.pairs_weighted)


def problem(pack: Path, model_hash: str) -> str:
    """What is wrong with the lists in a pack, in words; "" when nothing is, or there are none."""
    try:
        if (pack / NAME).exists():
            load(pack / NAME, model_hash=model_hash)
    except ProfileError as error:
        return str(error)
    return ""


def _named(ranked: BuddyTable, suffix: str) -> dict[str, npt.NDArray[Any]]:
    return {name + suffix: np.ascontiguousarray(value) for name, value in ranked._asdict().items()}


def _ranked(arrays: dict[str, npt.NDArray[Any]], suffix: str, layers: int, experts: int) -> BuddyTable:
    found = BuddyTable(**{name: arrays[name + suffix] for name in TYPES})
    shape = (layers, experts, found.peers.shape[-1])
    for name, array in found._asdict().items():
        if array.dtype != TYPES[name] or array.shape != (shape[:2] if name == "whole" else shape):
            raise ValueError(f"{name}{suffix} is {array.dtype} {list(array.shape)}")
    if found.peers.min() < -1 or found.peers.max() >= experts:
        raise ValueError(f"peers{suffix} names an expert that is not there")
    return found


def _profile(head: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> Profile:
    plain = {name: head[name] for name in _PLAIN}
    layers, experts = int(plain["layers"]), int(plain["experts"])
    weighted = spread(_ranked(arrays, "_weighted", layers, experts)) if "peers_weighted" in arrays else None
    return Profile(**plain, pairs=spread(_ranked(arrays, "", layers, experts)), pairs_weighted=weighted)
