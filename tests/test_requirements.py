"""What commands require: versions as the standard compares them, markers as pip reads them."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

import launch
from app.start import installer
from app.start.commands import COMMANDS

NUMBERS = st.lists(st.integers(0, 30), min_size=1, max_size=4).map(lambda ns: ".".join(map(str, ns)))


@given(version=NUMBERS, low=NUMBERS, high=NUMBERS, local=st.sampled_from(["", "+cpu", "+cu130", ".post1"]))
def test_versions_compare_as_the_standard_says(version: str, low: str, high: str, local: str) -> None:
    wanted = f"thing>={low},<{high}"
    expected = Requirement(wanted).specifier.contains(Version(version + local.replace(".post1", "")))
    assert installer.fits(version + local, wanted) == expected


@pytest.mark.parametrize(
    ("version", "fits"),
    [
        ("2.11.0", True),
        ("2.13.9+cpu", True),
        ("2.14.0", False),
        ("2.10.1", False),
        ("2.14.0a0+git12", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_torch_stays_within_its_bounds(version: str, fits: bool) -> None:
    torch = next(r for r in installer.requirements("chat") if installer.name_of(r) == "torch")
    assert installer.fits(version, torch) is fits


def test_every_requirement_is_bounded_and_understood() -> None:
    for requirement in installer.requirements("test"):
        parsed = Requirement(requirement)
        assert parsed.name == installer.name_of(requirement)
        assert sorted(s.operator for s in parsed.specifier) == ["<", ">="], requirement


@pytest.mark.parametrize("system", ["Linux", "Windows", "Darwin"])
def test_markers_mean_to_it_what_they_mean_to_pip(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((launch.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [Requirement(r) for r in (*project["dependencies"], *project["optional-dependencies"]["test"])]
    wanted = {r.name for r in declared if r.marker is None or r.marker.evaluate({"platform_system": system})}
    monkeypatch.setattr(installer.platform, "system", lambda: system)
    assert {installer.name_of(r) for r in installer.requirements("test")} == wanted
    assert ("triton-windows" in wanted) == (system == "Windows") and ("triton" in wanted) == (system == "Linux")


def test_windows_needs_a_triton_made_for_its_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer.platform, "system", lambda: "Windows")
    found = {"torch": "2.12.0+cu128", "triton-windows": ""}
    monkeypatch.setattr(installer, "installed", lambda name: found.get(name, "1.0"))
    assert "triton-windows" in {installer.name_of(r) for r in installer.missing("chat")}
    for version, fits in (("3.6.0.post26", True), ("3.7.0.post26", True), ("3.5.1.post24", False), ("3.8.0", False)):
        found["triton-windows"] = version
        assert ("triton-windows" not in {installer.name_of(r) for r in installer.missing("chat")}) is fits


def test_a_command_lacks_only_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer, "installed", lambda name: "")
    names = {command: {installer.name_of(r) for r in installer.missing(command)} for command in COMMANDS}
    assert "torch" in names["chat"] and "gradio" not in names["chat"]
    assert "gradio" in names["ui"] and "pytest" not in names["ui"]
    assert {"gradio", "pytest", "ruff"} <= names["test"]
    assert {"fastapi", "pydantic"} <= names["batch"] and "gradio" not in names["batch"]


def test_absent_and_half_installed_packages_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfthere-1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installer.installed("no-such-distribution") == ""
    assert installer.installed("halfthere") == ""
    assert installer.installed("pytest") == pytest.__version__
