"""The command line: options come out of the registry, ports are chosen honestly, errors are one line and a log."""

import argparse
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import cli
from app.cli import MODULES, options, test, ui
from app.server.security.access import Access
from app.ui.serve import StartOptions
from core.errors import MoestroError, SettingError
from core.settings.config import params
from core.settings.loading import LoadSpec
from core.settings.param import declared
from core.settings.sampling import Sampling
from core.system.command import called


def test_every_knob_can_be_set_and_arrives() -> None:
    words = (
        "chat --format int4-g128-sym --budget 25% --eviction lcp --telemetry off --link-gbps 1.5 "
        "--temperature 0.7 --top-k 5 --set eviction.lcp.omega=64 --set seed=3 --set context=512"
    ).split()
    args = cli.parse(words)
    spec, sampling = options.spec(args), options.sampling(args)
    assert (spec.format, spec.context, spec.model) == ("int4-g128-sym", 512, "demo")
    assert spec.settings.choice("eviction") == ("lcp", {"rho": 0.25, "omega": 64})
    assert (str(spec.settings.cache.budget), spec.settings["telemetry"], spec.settings["link_gbps"]) == (
        "25%",
        "off",
        1.5,
    )
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.7, 5, 3)


def test_every_knob_has_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["chat", "--help-all"])
    shown = capsys.readouterr().out
    names = [*declared(LoadSpec), *declared(Sampling)] + [n for n in params() if "." not in n]
    assert [name for name in names if f"--{name.replace('_', '-')} " not in shown] == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["chat", "--budget", "120%"], "between 0 % and 100 %"),
        (["chat", "--eviction", "psychic"], "Choose one of"),
        (["chat", "--temperature", "9"], "between 0 and 2"),
        (["chat", "--set", "eviction.lfu=4"], "no setting called"),
        (["chat", "--set", "seed"], "NAME=VALUE"),
        (["ui", "--port", "70000"], "1 to 65535"),
        (["chat", "--bugdet", "5"], "--bugdet"),
        (["--prot", "1"], "--prot"),
    ],
)
def test_what_is_wrong_is_said(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


def test_no_command_is_the_dashboard_and_test_passes_words_on() -> None:
    assert cli.parse([]).command == cli.parse(["--no-browser"]).command == "ui"
    assert cli.parse(["test", "-k", "link and not gpu", "tests/policy", "-x"]).pytest == [
        "-k",
        "link and not gpu",
        "tests/policy",
        "-x",
    ]


def help_of(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["chat", "ui", "eval", "calibrate"])
def test_help_is_what_is_used_often_and_where_the_rest_is(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    brief, whole = (help_of([command, asked], capsys) for asked in ("--help", "--help-all"))
    assert "--budget " in brief and "--help-all" in brief
    for rare in ("--threads ", "--link-gbps ", "--rho "):  # two that are advanced, and one that depends on --miss
        assert rare not in brief and rare in whole
    assert {line for line in brief.splitlines() if line.startswith("  --")} < {*whole.splitlines()}
    assert help_of([command, "--help"], capsys) == brief


def test_calibrating_has_two_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of(["profile", "--help"], capsys) == help_of(["calibrate", "--help"], capsys)
    assert cli.parse(["profile"]).run is cli.parse(["calibrate"]).run


def test_help_on_the_data(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    said = help_of(["--help"], capsys)
    assert "MOESTRO_HOME" in said and str(tmp_path) in "".join(said.split())


LIGHT = """
import sys
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] == "bench" else find(name, *more)
import app.cli, core.simulate
app.cli.build_parser().format_help()
assert app.cli.parse(["doctor"]).command == "doctor" and not {"bench", "papers", "accept"} & app.cli.MODULES.keys()
heavy = "torch", "transformers", "gradio", "pandas", "plotly", "bench"
print([name for name in sys.modules if name.partition(".")[0] in heavy])
"""


def test_help_and_simulations_need_nothing_heavy_and_the_application_no_benches() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], cwd=test.ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_an_installed_copy_has_no_tests_and_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(test, "TESTS", tmp_path / "tests")
    assert cli.main(["test", "-k", "link"]) == 2
    assert "Clone the repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("started_as", "command"),
    [
        ("launch.py", "python launch.py"),
        ("/opt/venv/bin/moestro", "moestro"),
        (r"C:\venv\Scripts\moestro.exe", "moestro"),
        ("/opt/moestro/launch.py", "python launch.py"),
        ("", "python launch.py"),
    ],
)
def test_texts_name_the_command_as_it_was_started(started_as: str, command: str) -> None:
    assert called(started_as) == command


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_taken_port_is_refused_when_asked_for(taken: int) -> None:
    with pytest.raises(MoestroError, match=f"Port {taken} .*--port"):
        ui.choose_port("127.0.0.1", taken)


def test_the_next_free_port_is_taken_when_none_was_asked_for(taken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui, "FIRST", taken)
    assert taken < ui.choose_port("127.0.0.1", None) < taken + ui.TRIED


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(MoestroError, match="--address"):
        ui.choose_port("192.0.2.1", None)


def failing(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(MODULES["doctor"], "run", run)
    return cli.main(["doctor"])


def test_an_expected_error_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(SettingError("That does not fit."), monkeypatch) == 2
    assert capsys.readouterr().err == "That does not fit.\n"


def test_errors_are_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path))
    assert failing(ZeroDivisionError("by nought"), monkeypatch) == 1
    printed = capsys.readouterr().err
    log = tmp_path / "moestro.log"
    assert "by nought" in printed and str(log) in printed and "Traceback" not in printed
    assert "Traceback" in log.read_text(encoding="utf-8")


def test_without_a_place_for_the_log_the_traceback_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("MOESTRO_HOME", str(tmp_path / "file"))
    assert failing(ZeroDivisionError("by nought"), monkeypatch) == 1
    assert "Traceback" in capsys.readouterr().err


def test_ctrl_c_ends_cleanly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert failing(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err.strip() == "Stopped."


def test_ctrl_c_is_how_the_dashboard_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    served: list[object] = []

    def serve(asked: StartOptions, access: Access, browser: bool, **_: object) -> None:
        served.append((asked, access, browser))
        raise KeyboardInterrupt

    monkeypatch.setattr("app.ui.serve.serve", serve)
    assert cli.main(["--context", "512", "--budget", "50%", "--no-browser"]) == 0
    # a value that equals the default was still asked for; what was not named is not there
    assert served == [(StartOptions(None, {"context": 512}, {"budget": "50%"}), Access(), False)]
    assert capsys.readouterr() == ("", "")


@pytest.fixture(autouse=True)
def no_browser_is_sought(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test.browser, "provide", lambda say: None)
    monkeypatch.delenv(test.browser.NEEDED, raising=False)


def test_one_failed_check_fails_the_run_and_pytest_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def call(name: str, command: tuple[str, ...], parallel: bool = False) -> int:
        ran.append(name)
        return int(name == "mypy")

    monkeypatch.setattr(test, "call", call)
    assert test.run(cli.parse(["test", "-k", "some"])) == 1
    assert ran == ["ruff", "ruff format", "import-linter", "mypy", "pytest"]


def test_without_a_choice_of_tests_slow_checks_run_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    both, said = threading.Barrier(2, timeout=60), list[str]()

    def call(name: str, command: tuple[str, ...], parallel: bool = False) -> int:
        said.append(f"{name} parallel" if parallel else name)
        if name in ("pytest", "mypy"):
            both.wait()  # ends only when both are running
        return int(name == "import-linter")

    monkeypatch.setattr(test, "call", call)
    assert test.run(cli.parse(["test"])) == 1
    assert said[:2] == ["ruff", "ruff format"]
    assert sorted(said[2:]) == ["import-linter parallel", "mypy parallel", "pytest"]


def test_what_a_parallel_check_prints_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    assert test.call("some", ("-c", "import sys; print('out'); sys.exit('why')"), parallel=True) == 1
    assert capfd.readouterr().out.split() == ["==", "some", "out", "why"]


def test_compiled_modules_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for parallel in (True, False):
        assert test.call("some", ("-c", "import sys; sys.exit(sys.dont_write_bytecode)"), parallel=parallel) == 0


def test_long_tests_are_asked_for_with_all(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(test, "call", lambda name, command, parallel=False: commands.append(command) or 0)
    assert test.run(cli.parse(["test", "-m", "gpu"])) == test.run(cli.parse(["test", "--all", "-m", "gpu"])) == 0
    assert commands[4][-2:] == commands[9][-2:] == ("-m", "gpu")
    assert "--all" not in commands[4] and "--all" in commands[9]
    monkeypatch.setattr(test.time, "time", lambda: 1000.0)
    assert test.run(cli.parse(["test", "--long", "--minutes", "2"])) == 0
    assert commands[10][-4:] == ("-m", "long", "--until", "1120.0") and len(commands) == 11


def test_fuzzing_takes_the_place_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(test, "call", lambda name, command: commands.append(command) or 1)
    assert test.run(cli.parse(["test", "--fuzz", "1.5", "--kind", "trace"])) == 1
    assert commands == [("-m", "tests.fuzz", "--minutes", "1.5", "--kind", "trace")]


def test_workers_leave_room_for_what_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test.os, "cpu_count", lambda: 32)
    assert test.workers([])[:2] == ["-n", "4"]
    assert test.workers(["-n0"]) == test.workers(["--pdb"]) == []
    monkeypatch.setattr(test.os, "cpu_count", lambda: 1)
    assert test.workers([]) == []
