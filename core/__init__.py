"""Moestro's engine: policy decides, memory moves, runtime executes. It knows nothing of the dashboard in `app`."""

from core import policy  # registers every variant before settings are built from the registry
from core.system.process_memory import bound_caches

bound_caches()

__all__ = ["policy"]
__version__ = "0.1.0"
