"""The stored calibration profiles of all models, and the buddy lists of a profile in its model's pack."""

import logging
import sys
from functools import lru_cache
from pathlib import Path

from app.store.home import data_dir
from core.errors import ProfileError
from core.profile import Profile, load, profile_path, save

log = logging.getLogger("moestro.app")


class StoredProfiles:
    """The profiles in the data folder. `problem` = why the one last looked for is not used; "" = it is, or there is
    none."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self.problem = ""

    def find(self, model_hash: str) -> Profile | None:
        """The profile for a model being loaded. None if it cannot be read; `problem` says why."""
        path = profile_path(self._home, model_hash)
        self.problem = ""
        if not path.exists():
            return None
        try:
            return load(path, model_hash=model_hash)
        except ProfileError as error:
            log.warning("a profile is not used: %s", error)
            self.problem = str(error)
            return None

    def known(self, model_hash: str) -> Profile | None:
        """The profile for an estimate of a model, which need not be loaded. None if there is none that can be read;
        `problem` stays as it is."""
        path = profile_path(self._home, model_hash)
        try:
            return _known(path, path.stat().st_mtime_ns, model_hash)
        except OSError:
            return None

    def add(self, fresh: Profile, model_hash: str) -> Profile:
        """Store what was measured, over what the stored profile has; returns both together. Raises ProfileError."""
        old = self.find(model_hash)
        whole = fresh if old is None else fresh.over(old)
        save(whole, profile_path(self._home, model_hash))
        self.problem = ""
        return whole

    def delete(self, model_hash: str) -> None:
        """Remove the profile of a model, if there is one."""
        path = profile_path(self._home, model_hash)
        path.unlink(missing_ok=True)
        path.with_suffix(".predictions.json").unlink(missing_ok=True)  # of earlier versions
        self.problem = ""


@lru_cache(maxsize=2)
def _known(path: Path, modified_ns: int, model_hash: str) -> Profile | None:
    """Read until the file changes; None when it cannot be."""
    try:
        return load(path, model_hash=model_hash)
    except ProfileError:
        return None


def stored_profile(model_hash: str) -> Profile | None:
    """The stored calibration profile for an engine that loads the model. None if unreadable, with a message on
    stderr."""
    path = profile_path(data_dir(), model_hash)
    if not path.exists():
        return None
    try:
        return load(path, model_hash=model_hash)
    except ProfileError as error:
        print(f"{error} Until then the model is used without it.", file=sys.stderr)
        return None


def save_buddies_in_pack(model: str, profile: Profile) -> list[str]:
    """Store the buddy lists in the model's pack, if it is one, to be copied with it; returns messages for display."""
    from core.hf.files import model_path
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
