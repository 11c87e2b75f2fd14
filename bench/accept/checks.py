"""The checks of `launch.py accept`, the most telling first. A check is a command that ends within its limit."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

WINDOWS = os.name == "nt"
TESTS = Path(__file__).resolve().parents[2] / "tests"
PROMPT = "What does heapq.heappush do?"


@dataclass(frozen=True, slots=True)
class Check:
    """`command` is given a folder that is emptied afterwards. It has passed when it ends with one of `good`; its last
    line that is a JSON object holds its figures."""

    name: str
    what: str
    limit_s: float
    command: Callable[[Path], list[str]]
    good: tuple[int, ...] = (0,)
    without: Callable[[], str] = lambda: ""  # why it cannot be made here; "" = it can
    environment: dict[str, str] = field(default_factory=dict)  # "{folder}" in it is that folder


def _own(name: str, small: bool) -> Callable[[Path], list[str]]:
    return lambda folder: [sys.executable, "-m", "bench.accept.work", name, str(folder), *["--small"] * small]


def _launch(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [sys.executable, "launch.py", *(word.replace("{folder}", str(folder)) for word in words)]


def _pytest(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *words]


def _without_tests() -> str:
    if not TESTS.is_dir():
        return "an installed copy comes without the tests"
    return "" if importlib.util.find_spec("pytest") else "pytest is not installed; `python launch.py test` installs it"


def _without_sanitizer() -> str:
    return _without_tests() or ("" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the path")


def _sanitized(folder: Path) -> list[str]:
    tests = _pytest("tests/gpu/test_kernels.py", "-k", "dequantization and int4 or same_inputs")(folder)
    return ["compute-sanitizer", "--error-exitcode", "9", *tests]


def checks(small: bool = False) -> tuple[Check, ...]:
    """All of them. `small`: with models so small that no figure means anything, to try the checks themselves."""
    return (
        Check("machine", "hardware, versions, what products keep for themselves", 120, _own("machine", small)),
        Check("doctor", "what Moestro sees of this machine", 180, _launch("doctor", "--json"), good=(0, 1)),
        Check("tests", "the tests that need a GPU", 600, _pytest(), without=_without_tests),
        Check("copies", "the link: large copies, experts, and the wait for one", 180, _own("copies", small)),
        Check("zerocopy", "kernels that read experts out of host memory", 180, _own("zerocopy", small)),
        Check(
            "launches", "kernels launched through the driver: their bits, and how long", 240, _own("launches", small)
        ),
        Check("attention", "whether attention is planned anew for each length", 120, _own("attention", small)),
        Check("norms", "norms in one launch: how long, and which bits", 120, _own("norms", small)),
        Check("rotation", "rotary embeddings in one launch: how long, and which bits", 120, _own("rotation", small)),
        Check("nodes", "what a launch takes, by the host and in a graph", 60, _own("nodes", small)),
        Check("rows", "products of few and of many rows: how long, and their bits", 180, _own("rows", small)),
        Check("prompts", "the same bits of prompts, whichever experts are resident", 300, _own("prompts", small)),
        Check("stress", "the same bits with few slots as with all", 420, _own("stress", small)),
        Check("speed", "tokens a second, and where the time goes", 600, _own("speed", small)),
        Check("decode", "tokens led by the GPU: their bits, and how many a second", 600, _own("decode", small)),
        Check("memory", "what torch reserves beyond the budget, and what unloading leaves", 420, _own("memory", small)),
        Check("swap", "a model loaded in the place of another", 300, _own("swap", small)),
        Check(
            "bandwidth",
            "how near the kernels come to the memory's speed",
            300,
            _pytest("-s", "tests/gpu/test_kernels.py", "-k", "how_fast"),
            without=_without_tests,
        ),
        Check("sanitizer", "no kernel reads or writes outside its slots", 300, _sanitized, without=_without_sanitizer),
        Check(
            "chat",
            "an answer of the demo model",
            120,
            _launch(
                "chat", "--model", "demo", "--budget", "50%", "--prompt", PROMPT, "--max-new-tokens", "48", "--json"
            ),
        ),
        Check(
            "quick",
            "the demo model against transformers",
            300,
            _launch("bench", "quick", "--json", "--save", "{folder}/quick.json", *("--rounds", "1") * small),
        ),
        Check(
            "no_compiler",
            "an answer where Triton finds no C compiler",
            300,
            _own("no_compiler", small),
            without=lambda: "on Windows Triton brings its compiler along" if WINDOWS else "",
            environment={"CC": "no-such-compiler", "TRITON_CACHE_DIR": "{folder}"},
        ),
    )
