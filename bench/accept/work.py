"""One check of `launch.py accept`: `python -m bench.accept.work NAME FOLDER SECONDS [--small]`. Prints its figures as
lines of JSON, those of longer checks part by part, and ends with an error where something is wrong. Parts that would
not be over in time are left out."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.accept import arithmetic, decode, engines, joined, launches, link, parts, prompts
from bench.accept.drawn import Subject, subject
from core.errors import MoestroError

SPARE = 0.15  # share of a check's time for what is loaded, unloaded and started around its parts
WORK: dict[str, Callable[[Subject], dict[str, Any]]] = {
    "machine": link.machine,
    "copies": link.copies,
    "zerocopy": link.zerocopy,
    "launches": launches.launches,
    "attention": parts.attention,
    "norms": parts.norms,
    "rotation": parts.rotation,
    "nodes": prompts.graph_nodes,
    "rows": prompts.rows,
    "prompts": prompts.prompts,
    "stress": engines.stress,
    "decode": decode.led_by_the_gpu,
    "fast": arithmetic.fast,
    "joined": joined.joined_by_the_host,
    "speed": engines.speed,
    "memory": engines.memory,
    "swap": engines.swap,
    "no_compiler": engines.no_compiler,
}


def main(words: list[str]) -> int:
    """Exit code 1 with a line that says why, when the check fails in a way that it knows."""
    name, folder, seconds, *options = words
    began_s = time.perf_counter()
    try:
        limit_s = (1 - SPARE) * float(seconds)
        found = WORK[name](subject(Path(folder), small="--small" in options, limit_s=limit_s))
    except (MoestroError, link.Wrong) as error:
        traceback.print_exc()
        print(error)
        return 1
    print(json.dumps({**found, "took_s": round(time.perf_counter() - began_s, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
