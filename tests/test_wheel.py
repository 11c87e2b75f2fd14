"""What the package declares: requirements, every file that is read; installed, it is a working `moestro`."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.requirements import Requirement
from packaging.version import Version

import launch
from app.start import installer
from app.start.commands import COMMANDS
from core import __version__
from tests.client.process import Server

ROOT = Path(__file__).resolve().parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = ("app", "assets", "bench", "core")
BY_A_CLONE = {"tests", "docs", ".venv"}  # read only by `test`, and where packages are missing
BUILDS = ("README.md", "LICENSE", "launch.py", "pyproject.toml")


def declared() -> set[Path]:
    """The files that pyproject.toml puts into a wheel, relative to the root."""
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["moestro"]
    found = {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}
    return {path.relative_to(ROOT) for path in (*found, *ROOT.glob("*.py"))}


def test_the_wheel_has_every_file_of_its_folders_and_nothing_else() -> None:
    there = {path for name in FOLDERS for path in (ROOT / name).rglob("*") if path.is_file()}
    own = {path.relative_to(ROOT) for path in there if path.parent.name != "__pycache__"}
    assert declared() == own | {Path("launch.py"), Path("pyproject.toml")}


def test_what_is_read_beside_the_code_is_in_the_wheel() -> None:
    joined = re.compile(r'(?:\bROOT|\.parents\[\d\]) / "([^"]+)"')
    files = [ROOT / "launch.py", *(path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))]
    read = {name for path in files for name in joined.findall(path.read_text(encoding="utf-8"))}
    assert {"assets", "app", "core", "launch.py", "pyproject.toml"} <= read
    assert read <= {path.parts[0] for path in declared()} | BY_A_CLONE


def test_version_changelog_and_tag_agree() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert next(name for name in headings if name != "Unreleased").split()[0] == __version__
    command = ["git", "tag", "--points-at", "HEAD", "v*"]
    if shutil.which("git"):
        tags = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
        assert tags in ([], [f"v{__version__}"])


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel. `run` starts its command in an empty folder."""

    python: Path
    command: Path
    packages: Path
    empty: Path
    home: Path

    def run(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(self.command), *words], cwd=self.empty, capture_output=True, encoding="utf-8", check=False
        )
        assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
        return done

    def files(self) -> set[str]:
        """The files of the installed folder, but for Python's compiled modules."""
        found = (self.packages / "moestro").rglob("*")
        return {str(path) for path in found if path.is_file() and path.parent.name != "__pycache__"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of what it is built from: building writes beside its sources."""
    for needed in ("pip>=22.3", *PROJECT["build-system"]["requires"]):
        if not installer.fits(installer.installed(installer.name_of(needed)), needed):
            pytest.skip(f"{needed} is not installed, and nothing is downloaded")
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BUILDS:
        shutil.copy(ROOT / name, source)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    (found,) = built.iterdir()
    assert found.name == f"moestro-{__version__}-py3-none-any.whl"
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """The wheel in an environment that also has the packages of this one."""
    place = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place / "venv")], check=True)
    scripts = place / "venv" / ("Scripts" if os.name == "nt" else "bin")
    python = scripts / ("python.exe" if os.name == "nt" else "python")
    pip("--python", str(python), "install", "--no-deps", "--no-index", str(wheel))
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages, ours = (
        Path(subprocess.run([one, "-c", where], capture_output=True, text=True, check=True).stdout.strip())
        for one in (str(python), sys.executable)
    )
    assert {path.name for path in packages.iterdir()} == {"moestro", f"moestro-{__version__}.dist-info"}
    (packages / "other.pth").write_text(f"{ours}\n", encoding="utf-8")
    empty = place / "empty"
    empty.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PYTHONPATH", raising=False)
        patch.setenv("MOESTRO_HOME", str(place / "home"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        one = Installed(python, scripts / "moestro", packages, empty, place / "home")
        before = one.files()
        yield one
        assert one.files() == before, "an installed copy writes nothing into its own folder"
        assert not list(empty.iterdir())


def pip(*words: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


@pytest.mark.long(1)
def test_its_files_are_those_declared(installed: Installed) -> None:
    folder = installed.packages / "moestro"
    assert {Path(path).relative_to(folder) for path in installed.files()} == declared()
    assert installed.run("--version").stdout == f"Moestro {__version__}\n"


@pytest.mark.long(0.2)
def test_its_texts_name_its_own_command(installed: Installed) -> None:
    text = installed.run("--help").stdout + installed.run("models").stdout + installed.run("ui", "--help").stdout
    text += installed.run("chat", "--bugdet", "5", code=2).stderr
    assert "usage: moestro" in text and "`moestro import`" in text and "launch.py" not in text


@pytest.mark.long(0.2)
def test_it_knows_itself_and_has_no_tests(installed: Installed) -> None:
    done = subprocess.run([str(installed.command), "doctor", "--json"], cwd=installed.empty, capture_output=True)
    found = json.loads(done.stdout)
    assert done.returncode == (1 if found["problems"] else 0)
    assert found["moestro"] == __version__ and Path(found["executable"]).parent == installed.python.parent
    assert all(one["fits"] for one in found["packages"])
    assert "comes without the tests" in installed.run("test", code=2).stderr


@pytest.mark.long(1)
def test_it_answers_and_simulates_in_further_processes(installed: Installed, tmp_path: Path) -> None:
    trace = tmp_path / "talk.trace"
    words = ("--prompt", "What does heapq.heappush do?", "--max-new-tokens", "24", "--record", str(trace))
    assert "heap" in installed.run("chat", "--model", "demo", *words).stdout
    table = installed.run("simulate", "--trace", str(trace), "--slots", "25%,50%", "--processes", "2").stdout
    assert "belady" in table.lower()


@pytest.mark.long(2)
def test_a_bench_starts_its_processes_and_keeps_its_result_among_the_data(installed: Installed) -> None:
    """Each measurement is a process, started by its module's name."""
    installed.run(
        "bench", "tiers", "--small", "--peers", "none", "--formats", "int4", "--budgets", "50%", "--tokens", "4"
    )
    (result,) = (installed.home / "bench" / "results").iterdir()
    found = json.loads(result.read_text(encoding="utf-8"))
    assert found["bench"] == "tiers" and found["tok_s"]["int4"]["50%"]["moestro"] > 0
    assert "holds" in installed.run("papers").stdout  # from the results in the wheel


@pytest.mark.long(1)
def test_the_dashboard_opens_with_the_demo_model(installed: Installed) -> None:
    program = [str(installed.command)]
    with Server(installed.home, program=program, folder=installed.empty) as server:
        assert server.http.json("/healthz")["model"] == "demo"
        status, page = server.http.ask("/")
        assert status == 200
        own = set(re.findall(r"/ui/[\w/]+\.css", page.decode()))
        assert {server.http.ask(path)[0] for path in (*own, "/ui/chat/view.js", "/ui/deck/js/main.js")} == {200}
        assert len(own) >= 7 and not server.complaints()
        assert server.end() == ""


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
