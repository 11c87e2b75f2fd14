"""Finds the stored profile of a model, and copies the buddy lists of a profile into its pack."""

from __future__ import annotations

import sys

from app.store.home import data_dir
from core.errors import ProfileError
from core.profile import Profile, load, profile_path


def stored(model_hash: str) -> Profile | None:
    """The stored calibration profile for an engine that loads the model. None if unreadable, with a message on
    stderr.
    """
    path = profile_path(data_dir(), model_hash)
    if not path.exists():
        return None
    try:
        return load(path, model_hash=model_hash)
    except ProfileError as error:
        print(f"{error} Until then the model is used without it.", file=sys.stderr)
        return None


def carried(model: str, profile: Profile) -> list[str]:
    """Store the buddy lists in the model's pack, if it is one, to be copied with it; returns messages for display."""
    from core.capacity.plan import model_path
    from core.memory.pack import pack_at
    from core.profile import buddies

    pack = model_path(model)
    if not profile.has("pairs") or not pack_at(pack):
        return []
    try:
        buddies.save(profile, pack / buddies.NAME)
    except ProfileError as error:
        return [str(error)]
    return [f"The buddy lists travel with the pack, in {pack / buddies.NAME}"]
