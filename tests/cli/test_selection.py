"""Which tests run: those of a GPU where it is, and of many cases a few that cover every pair."""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.selection import GPU, by_turns, covering

ROOT = Path(__file__).resolve().parents[2]


def test_tests_that_need_a_gpu_are_where_they_are_looked_for() -> None:
    others = [file for file in (ROOT / "tests").rglob("test_*.py") if not file.is_relative_to(GPU)]
    mark = "pytest.mark." + "gpu"
    assert [file.name for file in others if mark in file.read_text(encoding="utf-8")] == []
    assert all(mark in file.read_text(encoding="utf-8") for file in GPU.glob("test_*.py"))


NEEDED = ("torch", "transformers", "numpy", "safetensors", "psutil", "pandas", "pytest")
REFUSING = """
import sys
from importlib.machinery import PathFinder

REFUSED = frozenset({refused})


class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in REFUSED else PathFinder.find_spec(name, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def required(names: Iterable[str]) -> set[str]:
    """The distributions that these need to be installed, themselves included."""
    found, left = set[str](), [*names]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        found.add(name)
        try:
            wanted = map(Requirement, metadata.requires(name) or ())
        except metadata.PackageNotFoundError:  # such as what only another platform has
            continue
        left += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.mark.long(0.2)
def test_those_need_no_more_than_the_engine_and_pytest(tmp_path: Path) -> None:
    """Every other package that is installed here cannot be imported."""
    allowed = required(NEEDED)
    refused = {
        module
        for module, owners in metadata.packages_distributions().items()
        if not any(canonicalize_name(owner) in allowed for owner in owners)
    } - {path.name for path in ROOT.iterdir()}
    assert {"hypothesis", "gradio", "pynvml", "llvmlite", "xdist", "fastapi"} <= refused
    (tmp_path / "sitecustomize.py").write_text(REFUSING.format(refused=sorted(refused)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "--collect-only"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line} == {
        file.relative_to(ROOT).as_posix() for file in GPU.glob("test_*.py")
    }


def test_cases_that_are_not_long_cover_every_pair_of_values() -> None:
    cases = covering("ab", (0, 1), [True, False], range(3))
    quick = [case.values for case in cases if not case.marks]
    assert len(cases) == 24 and len(quick) < 12
    for (i, one), (j, other) in itertools.combinations(enumerate(("ab", (0, 1), [True, False], range(3))), 2):
        assert {(case[i], case[j]) for case in quick} == {*itertools.product(one, other)}
    assert len([case for case in covering("ab", (0, 1), [True, False], together=1) if not case.marks]) == 2
    assert [case.values for case in by_turns("abc", (0, 1)) if not case.marks] == [("a", 0), ("b", 1), ("c", 0)]
