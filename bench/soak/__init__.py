"""`bench soak`: the real server under ten clients and an attacker, for any time: leaks, slowdowns and failures."""

from bench.soak.result import table
from bench.soak.run import run

__all__ = ["run", "table"]
