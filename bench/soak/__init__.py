"""`bench soak`: the real server under ten clients and an attacker, for any length of time: leaks, slowdowns, failures."""

from bench.soak.result import table
from bench.soak.run import run

__all__ = ["run", "table"]
