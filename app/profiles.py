"""Where a loaded model's profile is found."""

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
