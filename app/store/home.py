"""Location of a user's data on each system."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from core.system.paths import expanded

PRODUCTS = "products.json"  # in it: how long each way of computing a product takes here
KERNELS = "kernels"  # in it: their compiled code
DISTANCES = "distances.json"  # in it: how far the fast arithmetic is from the reference, by model and formats
PACES = "paces.json"  # in it: the time of the demo model's layers, to which its emulated link is scaled


def data_dir(env: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """The user's data directory (not created here). MOESTRO_HOME, when set, takes precedence on every system."""
    env = os.environ if env is None else env
    if home := env.get("MOESTRO_HOME"):
        return expanded(home)
    if platform == "win32":
        base = Path(env.get("LOCALAPPDATA") or expanded("~") / "AppData" / "Local")
    elif platform == "darwin":
        base = expanded("~") / "Library" / "Application Support"
    else:
        base = Path(env.get("XDG_DATA_HOME") or expanded("~") / ".local" / "share")
    return base / "moestro"
