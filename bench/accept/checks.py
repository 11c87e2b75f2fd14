"""The checks of `launch.py accept`, the most telling first. A check is a command that ends within its limit."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.start.installer import provide_tests

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


def _own(name: str, what: str, limit_s: float, small: bool, **more: Any) -> Check:
    def command(folder: Path) -> list[str]:
        own = [sys.executable, "-m", "bench.accept.work", name, str(folder), str(limit_s)]
        return [*own, *["--small"] * small]

    return Check(name, what, limit_s, command, **more)


def _launch(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [sys.executable, "launch.py", *(word.replace("{folder}", str(folder)) for word in words)]


def _pytest(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *words]


def _without_tests() -> str:
    if not TESTS.is_dir():
        return "an installed copy comes without the tests"
    missing = provide_tests()
    return f"this Python has no {' and no '.join(missing)}" if missing else ""


def _without_sanitizer() -> str:
    return _without_tests() or ("" if shutil.which("compute-sanitizer") else "compute-sanitizer is not on the path")


def _sanitized(folder: Path) -> list[str]:
    tests = _pytest("tests/gpu/test_kernels.py", "-k", "dequantization and int4 or same_inputs")(folder)
    return ["compute-sanitizer", "--error-exitcode", "9", *tests]


def checks(small: bool = False) -> tuple[Check, ...]:
    """All of them. `small`: with models so small that no figure means anything, to try the checks themselves."""
    return (
        _own("machine", "hardware, versions, what products keep for themselves", 120, small),
        Check("doctor", "what Moestro sees of this machine", 180, _launch("doctor", "--json"), good=(0, 1)),
        Check("tests", "the tests that need a GPU", 600, _pytest(), without=_without_tests),
        _own("copies", "the link: large copies, experts, and the wait for one", 180, small),
        _own("zerocopy", "kernels that read experts out of host memory", 180, small),
        _own("launches", "kernels launched through the driver: their bits, and how long", 240, small),
        _own("attention", "whether attention is planned anew for each length", 120, small),
        _own("norms", "norms in one launch: how long, and which bits", 120, small),
        _own("rotation", "rotary embeddings in one launch: how long, and which bits", 120, small),
        _own("nodes", "what a launch takes, by the host and in a graph", 60, small),
        _own("rows", "products of few and of many rows: how long, and their bits", 180, small),
        _own("prompts", "the same bits of prompts, whichever experts are resident", 300, small),
        _own("stress", "the same bits with few slots as with all", 420, small),
        _own("fast", "the fast arithmetic: the bits of this CPU, and how many tokens a second", 600, small),
        _own("speed", "tokens a second, and where the time goes", 600, small),
        _own("decode", "tokens led by the GPU: their bits, and how many a second", 600, small),
        _own("joined", "experts that the host computes within such tokens: their bits, and how long", 600, small),
        _own("memory", "what torch reserves beyond the budget, and what unloading leaves", 420, small),
        _own("swap", "a model loaded in the place of another", 300, small),
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
        _own(
            "no_compiler",
            "an answer where Triton finds no C compiler",
            300,
            small,
            without=lambda: "on Windows Triton brings its compiler along" if WINDOWS else "",
            environment={"CC": "no-such-compiler", "TRITON_CACHE_DIR": "{folder}"},
        ),
    )
