"""`bench soak`: the real server under ten clients for as long as one likes; what grows, slows, breaks."""

from bench.soak.result import table
from bench.soak.run import run

__all__ = ["run", "table"]
