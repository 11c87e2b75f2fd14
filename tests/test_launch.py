"""The one door: what it finds missing, where it goes on, what it installs, and what it says when it cannot."""

import ast
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import launch
from app.cli import MODULES
from app.start import bare_help, installer
from app.start.commands import COMMANDS
from core import __version__


class Calls:
    """Stands in for subprocess.call: remembers the commands, answers each with the next of `codes`, then with 0."""

    def __init__(self, *codes: int) -> None:
        self.commands: list[list[str]] = []
        self._codes = list(codes)

    def __call__(self, command: list[str]) -> int:
        self.commands.append(command)
        return self._codes.pop(0) if self._codes else 0


@pytest.fixture
def venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project folder with nothing in its `.venv`."""
    shutil.copy(launch.ROOT / "pyproject.toml", tmp_path)
    monkeypatch.setattr(installer, "ROOT", tmp_path)
    monkeypatch.setattr(installer, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(installer, "UNFINISHED", tmp_path / ".venv" / ".unfinished")
    installer.VENV.mkdir()
    return installer.VENV


def test_it_starts_on_an_old_python() -> None:
    source = (launch.ROOT / "launch.py").read_text(encoding="utf-8")
    tree = ast.parse(source, feature_version=(3, 7))
    imported = {
        node.names[0].name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imported <= sys.stdlib_module_names


def test_an_old_python_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2))
    assert launch.main(["doctor"]) == 1
    assert "Python 3.11 or newer" in capsys.readouterr().err


def test_commands_are_those_of_the_parser() -> None:
    assert COMMANDS.keys() == MODULES.keys()
    code, text = bare_help.answer("ui", ["--help"]) or (1, "")
    assert code == 0 and all(f"python launch.py {name} " in text for name in MODULES)


def test_an_unknown_command_installs_nothing(venv: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, says in (("tset", "Did you mean test?"), ("serve", "Did you mean ui?"), ("xyzzy", "Commands: ui, chat")):
        assert launch.main([word]) == 2
        assert says in capsys.readouterr().err
    assert launch.main([str(venv)]) == 2
    assert f"--model {venv}" in capsys.readouterr().err
    assert not list(venv.iterdir())


def test_with_everything_there_nothing_is_made(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(installer, "missing", lambda command: [])
    monkeypatch.setattr(installer.subprocess, "call", Calls())
    monkeypatch.setattr("app.cli.main", lambda arguments: ran.append(arguments) or 0)
    assert launch.main(["doctor", "--json"]) == 0
    assert ran == [["doctor", "--json"]]
    assert not installer.subprocess.call.commands
    assert not list(venv.iterdir())


def test_the_version_needs_no_packages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(installer, "installed", lambda name: "")
    assert launch.main(["--version"]) == 0
    assert capsys.readouterr().out == f"Moestro {__version__}\n"


@pytest.mark.parametrize("command", ["chat", "ui", "test"])
def test_an_installed_copy_installs_nothing(
    command: str, venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []
    found = {"gradio": "", "pytest": ""}
    monkeypatch.setattr(installer, "INSTALLED", True)
    monkeypatch.setattr(installer, "installed", lambda name: found.get(name, metadata.version(name)))
    monkeypatch.setattr(installer.subprocess, "call", Calls())
    monkeypatch.setattr("app.cli.main", lambda arguments: ran.append(arguments) or 0)
    assert launch.main([command]) == 1 and not ran
    said = capsys.readouterr().err
    assert "installed without what it needs: gradio" in said and "pytest" not in said and "Install it again" in said
    found.pop("gradio")
    assert launch.main([command]) == 0 and ran == [[command]]
    assert not installer.subprocess.call.commands and not list(venv.iterdir())


def test_outside_it_hands_over_and_inside_it_installs(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[object] = []
    lacking = [["torch"], ["torch"], []]
    monkeypatch.setattr(installer, "missing", lambda command: lacking.pop(0))
    monkeypatch.setattr(installer, "enter_venv", lambda arguments: did.append(("enter", arguments)) or 0)
    monkeypatch.setattr(installer, "install", lambda command: did.append(("install", command)) or True)
    monkeypatch.setattr("app.cli.main", lambda arguments: did.append(("run", arguments)) or 0)
    launch.main(["chat", "--json"])
    monkeypatch.setattr(sys, "prefix", str(venv))
    launch.main(["chat", "--json"])
    assert did == [("enter", ["chat", "--json"]), ("install", "chat"), ("run", ["chat", "--json"])]


def test_tests_of_accept_are_installed_with_the_rest_and_can_be_missing(
    venv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {installer.name_of(r) for r in installer.requirements("accept")}
    assert names - {installer.name_of(r) for r in installer.requirements("ui")} == {*installer.RUNS_TESTS}
    have = installer.installed
    gone = {"pytest", "pytest-timeout"}
    monkeypatch.setattr(installer, "installed", lambda name: "" if name in gone else have(name))
    assert installer.missing("accept") == []
    calls = Calls()
    monkeypatch.setattr(subprocess, "call", calls)
    provide = installer.provide_tests.__wrapped__
    assert [installer.name_of(r) for r in provide()] == ["pytest", "pytest-timeout"] and not calls.commands
    monkeypatch.setattr(sys, "prefix", str(venv))
    assert len(provide()) == 2 and len(calls.commands) == 1, "as where there is no network"
    assert calls.commands[0][-2:] == [r for r in installer.requirements("test") if installer.name_of(r) in gone]
    gone.clear()
    assert provide() == [] and len(calls.commands) == 1


def test_an_interrupted_installation_is_taken_up_again(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    monkeypatch.setattr(installer, "missing", lambda command: [])
    monkeypatch.setattr(installer, "install", lambda command: did.append(command) or False)
    monkeypatch.setattr(sys, "prefix", str(venv))
    installer.UNFINISHED.touch()
    assert launch.main(["test"]) == 1
    assert did == ["test"]


def install(
    monkeypatch: pytest.MonkeyPatch, calls: Calls, gpu: bool, lacking: tuple[str, ...] = (), unused: str = ""
) -> bool:
    monkeypatch.setattr("core.capacity.device.passed_over", lambda name: unused)
    monkeypatch.setattr(installer.subprocess, "call", calls)
    monkeypatch.setattr(installer.shutil, "which", lambda name: "nvidia-smi" if gpu else None)
    monkeypatch.setattr(installer, "missing", lambda command: list(lacking))
    return installer.install("ui")


def test_one_resolver_run_sees_every_bound(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    assert install(monkeypatch, calls, gpu=False)
    assert len(calls.commands) == 1
    assert set(installer.requirements("ui")) <= set(calls.commands[0])
    assert not installer.UNFINISHED.exists()


def test_a_gpu_gets_the_build_its_driver_can_run(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    assert install(monkeypatch, calls, gpu=True)
    assert installer.UV in calls.commands[0]
    assert "--torch-backend=auto" in calls.commands[1] and set(installer.requirements("ui")) <= set(calls.commands[1])


def test_a_set_up_that_leaves_a_gpu_unused_says_why(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(monkeypatch, Calls(), gpu=True, unused="Computed on the CPU: this torch is a CPU build.")
    assert capsys.readouterr().out.endswith("\nComputed on the CPU: this torch is a CPU build.\n")


def test_torch_alone_is_replaced_by_what_the_driver_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(installer.subprocess, "call", calls)
    assert installer.replace_torch()
    (torch,) = (r for r in installer.requirements("ui") if installer.name_of(r) == "torch")
    assert calls.commands[1][-4:] == ["--torch-backend=auto", "--reinstall-package", "torch", torch]


@pytest.mark.parametrize(("system", "done", "runs"), [("posix", True, 2), ("nt", False, 1)])
def test_without_uv_windows_stops_and_linux_goes_on(
    venv: Path, monkeypatch: pytest.MonkeyPatch, system: str, done: bool, runs: int
) -> None:
    calls = Calls(1)
    monkeypatch.setattr(installer, "WINDOWS", system == "nt")
    assert install(monkeypatch, calls, gpu=True) is done
    assert len(calls.commands) == runs


@pytest.mark.parametrize(("code", "lacking"), [(1, ()), (0, ("torch",))])
def test_a_failed_installation_is_never_called_done(
    venv: Path, monkeypatch: pytest.MonkeyPatch, code: int, lacking: tuple[str, ...]
) -> None:
    assert not install(monkeypatch, Calls(code), gpu=False, lacking=lacking)
    assert installer.UNFINISHED.exists() or not code


@pytest.mark.parametrize(("windows", "where"), [(True, "Scripts/python.exe"), (False, "bin/python")])
def test_the_python_of_a_venv(venv: Path, monkeypatch: pytest.MonkeyPatch, windows: bool, where: str) -> None:
    monkeypatch.setattr(installer, "WINDOWS", windows)
    assert installer.venv_python() == venv / where


def test_a_python_without_ensurepip_is_named(
    venv: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(installer, "find_spec", lambda name: None)
    monkeypatch.setattr(installer, "debian", lambda *packages: asked.extend(packages) or False)
    assert installer.enter_venv(["ui"]) == 1
    assert asked == ["python3-venv"] and "python3-venv" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "apt", "codes", "done"),
    [
        (0, "apt-get", [0, 0], True),
        (0, "apt-get", [100, 0], True),  # the lists are old, and the package is there all the same
        (0, "apt-get", [0, 100], False),
        (1000, "apt-get", [], False),
        (0, None, [], False),
    ],
)
def test_debians_packages_are_installed_by_root_alone(
    monkeypatch: pytest.MonkeyPatch, user: int, apt: str | None, codes: list[int], done: bool
) -> None:
    left, steps = [*codes], []

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        steps.append(command)
        return subprocess.CompletedProcess(command, left.pop(0), "", "E: Unable to locate package")

    monkeypatch.setattr(installer, "WINDOWS", False)
    monkeypatch.setattr(installer.os, "geteuid", lambda: user, raising=False)
    monkeypatch.setattr(installer.shutil, "which", lambda name: apt)
    monkeypatch.setattr(installer.subprocess, "run", run)
    assert installer.debian("chromium") is done
    assert not left and (not steps or "chromium" in steps[-1])


@pytest.mark.long(0.2)
def test_a_real_venv_is_made_and_a_dead_one_repaired(venv: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[list[str]] = []
    monkeypatch.setattr(installer, "hand_over", lambda command: entered.append(command) or 0)
    python = installer.venv_python()
    python.parent.mkdir()
    python.touch()  # does not start, like the one that an upgrade of the system's Python leaves behind
    assert not installer.works("import sys")
    assert installer.enter_venv(["doctor"]) == 0
    assert entered == [[str(python), str(installer.ROOT / "launch.py"), "doctor"]]
    assert subprocess.run([str(python), "-c", "import pip"], check=False).returncode == 0
