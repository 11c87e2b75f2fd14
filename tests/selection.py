"""Which tests run: those marked `long` only with `--all`, or when a marker expression (`-m`) names `long`. Without
`--all`, hypothesis draws fewer examples for a test that does not say how many, and none of the project's own constants;
it never fails one for being slow.

`--until TIME` skips, by name, each long test that would not be over by then. Under xdist the browser tests are one unit
of work, as they share a server and a browser, and come first; then the longest files, then those with most tests.

`-m gpu` reads tests/gpu alone, where these tests are, and needs what the engine needs, and pytest. Any other run
imports them, and torch sees no GPU.

A pytest plugin that imports nothing heavy; tests/conftest.py takes its hooks over.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import times

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine to try a GPU on may have no more than what the engine needs
    settings = None  # type: ignore[assignment, misc]

FEWER = 6  # examples; 100 are usual
BROWSER = "tests/browser"
NO_BROWSER = "no browser"  # why its tests are skipped
TESTS = Path(__file__).resolve().parent
GPU = TESTS / "gpu"
LONGEST = (  # files of few tests that take long: last, they would leave the other workers idle
    "tests/fuzz/test_fuzz.py",
    "tests/memory/test_interpreted.py",
    "tests/cuda/test_device_decode.py",
    "tests/cuda/test_token_graph.py",
    "tests/equality/test_logits.py",
    "tests/batch/test_command.py",
    "tests/engine/test_batching.py",
    "tests/profile/test_calibrate.py",
    "tests/cuda/test_races.py",
    "tests/engine/test_split.py",
    "tests/cli/test_browser.py",
    "tests/equality/test_text_to_text.py",
    "tests/engine/test_packs.py",
)


def layered(cases: Iterable[Any], quick: Callable[[Any], bool], minutes: float = 0.1) -> list[Any]:
    """The cases of a parametrised test, those that are not `quick` marked `long`. A tuple is one value a name.

    Most take a second or a few.
    """
    long = pytest.mark.long(minutes)
    return [
        case if quick(case) else pytest.param(*(case if type(case) is tuple else (case,)), marks=long) for case in cases
    ]


def covering(*axes: Sequence[Any], together: int = 2, minutes: float = 0.1) -> list[Any]:
    """All combinations of one value of each axis, as cases of a parametrised test. Those that are not marked `long`
    have every two values of two axes together: 4 of the 8 cases of three axes of two values; or 2 with each alone."""

    def parts(case: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(case), together))

    every = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing, quick = set().union(*map(parts, every)), set[tuple[int, ...]]()
    while missing:
        quick.add(best := max(every, key=lambda case: len(parts(case) & missing)))
        missing -= parts(best)
    long = pytest.mark.long(minutes)
    return [
        pytest.param(*(axis[at] for axis, at in zip(axes, case, strict=True)), marks=() if case in quick else long)
        for case in every
    ]


def by_turns(values: Iterable[Any], others: Sequence[Any]) -> list[Any]:
    """All pairs of a value and one of the `others`, not marked `long` where the others take turns."""
    pairs = (
        (at == n % len(others), (value, other)) for n, value in enumerate(values) for at, other in enumerate(others)
    )
    return [pytest.param(*pair, marks=() if is_quick else pytest.mark.long(0.1)) for is_quick, pair in pairs]


def examples(count: int, fewer: int = FEWER) -> Any:
    """Hypothesis' settings for a test that draws `count` examples with `--all`, and otherwise `fewer` at most."""
    return settings(max_examples=min(count, fewer) if settings().max_examples == FEWER else count)


def workerinput(config: pytest.Config) -> dict[str, Any]:
    """What xdist tells a worker; empty in the process that runs none, or runs all."""
    return getattr(config, "workerinput", {})


def unit(nodeid: str) -> str:
    """What one worker runs as a whole: a file, or the folder of the browser tests."""
    return BROWSER if nodeid.startswith(f"{BROWSER}/") else nodeid.split("::", 1)[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class Units(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return unit(nodeid)

    return Units(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The mark may say how many minutes a test takes: `long(5)`; otherwise it is one."""
    until, mark = item.config.getoption("--until"), item.get_closest_marker("long")
    if until is not None and mark is not None:
        minutes = mark.args[0] if mark.args else 1
        if time.time() + 60 * minutes > until:
            pytest.skip(f"no time was left for {item.nodeid}, about {minutes} min")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For `-m gpu`, all other tests: what they import may be absent."""
    if config.getoption("markexpr", "") != "gpu" or collection_path in (TESTS, *GPU.parents):
        return None
    return True if collection_path.is_relative_to(TESTS) and not collection_path.is_relative_to(GPU) else None


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "not used without pytest-timeout")
    parser.addoption("--all", action="store_true", help="also run the tests marked `long`")
    parser.addoption("--count-without-browser", help="a file for the number of tests that had no browser")
    parser.addoption("--until", type=float, help="begin no `long` test that would not end by then (Unix time)")


def pytest_configure(config: pytest.Config) -> None:
    times.register(config)
    if "gpu" not in config.getoption("markexpr", ""):  # what `auto` chooses must not depend on the machine
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    gc.disable()  # while libraries and tests are imported, of which nothing is to be collected: a sixth of the time
    if workerinput(config):  # once all else that is registered is done, or every run waits some seconds
        atexit.register(os._exit, 0)  # while half a million objects are taken down one by one
    if settings is None:
        return
    if not config.getoption("--all"):
        draw_no_constants()
    unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("all", unhurried)
    settings.register_profile("first layer", unhurried, max_examples=FEWER)
    settings.load_profile("all" if config.getoption("--all") else "first layer")


def draw_no_constants() -> None:
    """Have hypothesis not look for constants in the source of the whole project, to draw them now and then: in a new
    clone that takes each worker 6 s."""
    from hypothesis.internal.conjecture import providers

    if hasattr(providers, "_get_local_constants"):
        providers._get_local_constants = lambda: providers._local_constants


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, Any]:
    """Every other worker collects files from the last to the first: the modules that one of them compiles in a new
    clone, the other finds compiled."""
    report = yield
    if isinstance(collector, pytest.Directory) and int(workerinput(collector.config).get("workerid", "gw0")[2:]) % 2:
        report.result.reverse()
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write down how many tests had no browser: `launch.py test` ends with how to get one."""
    skipped = terminalreporter.stats.get("skipped", ())
    count = sum(report.longrepr[2] == f"Skipped: {NO_BROWSER}" for report in skipped)
    if count and (file := config.getoption("--count-without-browser")):
        Path(file).write_text(str(count), encoding="utf-8")


def pytest_collection_finish() -> None:
    gc.set_threshold(10_000)  # new objects: collecting after every 700 takes a fiftieth of the time
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `long` or `gpu` run where they are asked for; any other marker expression selects among the rest."""
    if workerinput(config):
        count = Counter(unit(item.nodeid) for item in items)
        first = {name: at for at, name in enumerate((BROWSER, *LONGEST))}

        def place(item: pytest.Item) -> tuple[int, int, str]:
            name = unit(item.nodeid)
            return first.get(name, len(first)), -count[name], item.nodeid.split("::", 1)[0]

        items.sort(key=place)
    asked = {
        *re.findall(r"\w+", str(config.getoption("markexpr", ""))),
        *(["long"] if config.getoption("--all") else []),
    }
    kept, others = list[pytest.Item](), list[pytest.Item]()
    for item in items:
        is_kept = all(item.get_closest_marker(name) is None for name in {"gpu", "long"} - asked)
        (kept if is_kept else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = kept
