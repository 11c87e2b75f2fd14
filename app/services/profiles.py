"""Where a loaded model's profile is found, and what of it goes into its pack."""

from __future__ import annotations

import sys

from app.store.home import data_dir
from core.errors import ProfileError
from core.profile import Profile, load, profile_path


def stored(model_hash: str) -> Profile | None:
    """What `profile` or the dashboard measured of a model, for an engine that loads it. One that cannot be read is
    none, and is said on stderr."""
    path = profile_path(data_dir(), model_hash)
    if not path.exists():
        return None
    try:
        return load(path, model_hash=model_hash)
    except ProfileError as error:
        print(f"{error} Until then the model is used without it.", file=sys.stderr)
        return None


def carried(model: str, profile: Profile) -> list[str]:
    """Put the buddy lists into the model's pack, if it is one, so that they travel with it; says so, or why not."""
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
