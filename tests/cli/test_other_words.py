"""What is typed and printed: other programs' words for options, standard input, and what `ui --for` tells a shell."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

import launch
from app import cli
from app.cli import MODULES, options, terminal
from app.cli.clients import PROGRAMS, instructions
from app.cli.parser import CommandParser
from app.start import bare_help
from app.start.commands import ALIASES
from app.start.option_aliases import INSTEAD, SAME, UnknownOptionError, translated
from core.types import Piece


@pytest.fixture(scope="module")
def parsers() -> dict[str, CommandParser]:
    (commands,) = (a for a in cli.build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return {name: commands.choices[name] for name in MODULES}


def test_other_programs_words_arrive_where_ours_do() -> None:
    line = "chat -m pack -p Hello -c 512 -n 7 --temp=0.5 --top_k 3 --top-p .9 -s 4 -t 2 --repeat-penalty 1.1"
    args = cli.parse(line.split())
    spec, sampling = options.spec(args), options.sampling(args)
    assert (args.prompt, spec.model, spec.context, spec.threads) == ("Hello", "pack", 512, 2)
    assert (sampling.max_new_tokens, sampling.temperature, sampling.top_k) == (7, 0.5, 3)
    assert (sampling.top_p, sampling.seed, sampling.repetition_penalty) == (0.9, 4, 1.1)
    assert cli.parse("--max-model-len 256 --model demo".split()).command == "ui"


@pytest.mark.parametrize(
    ("line", "address", "host"),
    [
        ("--host 0.0.0.0 --port 8080", "0.0.0.0", "auto"),
        ("ui --host=localhost", "localhost", "auto"),
        ("--host ::1 --host none", "::1", "none"),
        ("--host 2GB", "127.0.0.1", "2000000000"),
        ("--listen 0.0.0.0", "0.0.0.0", "auto"),
    ],
)
def test_a_host_that_is_an_address_is_listened_on(line: str, address: str, host: str) -> None:
    args = cli.parse(line.split())
    assert (args.address, options.spec(args).host) == (address, host)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("chat --bugdet 5", "There is no option --bugdet. Did you mean --budget? python launch.py chat --help-all"),
        ("chat --max-token 5", "Did you mean --max-new-tokens?"),
        ("batch --tmp 1", "Did you mean --temperature?"),
        ("import x --max-tokens 5", "There is no option --max-tokens."),
        ("--prot 1", "Did you mean --port?"),
        ("chat --n-gpu-layers 99", "--budget says how much memory"),
        ("chat -ngl 99", "--budget says how much memory"),
        ("ui --gpu_memory_utilization=0.9", "--budget says how much memory"),
        ("chat --prompt x --no-mmap", "--host says"),
    ],
)
def test_an_unknown_option_says_what_was_meant(line: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(line.split())
    assert end.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_values_that_begin_with_a_dash_are_values() -> None:
    words = ["--prompt", "-n of it", "--presence-penalty", "-0.5", "--", "-n"]
    known = ["--prompt", "--presence-penalty", "--max-new-tokens"]
    assert translated(words, known) == words
    with pytest.raises(UnknownOptionError):
        translated(["-n"], ["--prompt"])


def test_every_word_leads_to_an_option_that_some_command_has(parsers: dict[str, CommandParser]) -> None:
    known = {option for parser in parsers.values() for option in parser.options()}
    assert SAME.keys() <= known
    assert not {word for words in SAME.values() for word in words} & INSTEAD.keys()
    assert not INSTEAD.keys() & known


@pytest.mark.parametrize("command", MODULES)
def test_every_command_has_both_helps(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for asked in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as end:
            cli.main([command, asked])
        assert end.value.code == 0
        assert "--help-all" in capsys.readouterr().out


def test_the_words_of_others_are_in_the_long_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    for asked, shown in (("--help", False), ("--help-all", True)):
        with pytest.raises(SystemExit):
            cli.main(["chat", asked])
        assert ("--n-predict" in capsys.readouterr().out) is shown


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    """launch.py by a Python without packages."""
    command = [sys.executable, "-S", "launch.py", *words]
    return subprocess.run(command, cwd=launch.ROOT, capture_output=True, text=True, encoding="utf-8", check=False)


def test_without_packages_a_command_prints_its_own_options() -> None:
    done = bare("import", "--help")
    assert done.returncode == 0 and done.stderr == ""
    assert "`--blocks N`" in done.stdout and "--prompt" not in done.stdout


def test_without_packages_an_unknown_option_installs_nothing() -> None:
    done = bare("chat", "--prmpt", "x", "--dtype", "float32", "-n", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "There is no option --prmpt. Did you mean --prompt? See launch.py chat --help.\n"


@pytest.mark.parametrize("command", [*MODULES, "profile"])
def test_the_options_that_a_bare_machine_knows_are_commands(command: str, parsers: dict[str, CommandParser]) -> None:
    assert {*parsers[ALIASES.get(command, command)].options()} <= {*bare_help.known_options(command)}
    assert bare_help.answer(command, [command, "--help"]) == (0, bare_help.section(command)) != (0, "")


def test_it_is_written_over_and_wiped_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "FIRST_S", 0.0)
    monkeypatch.setattr(terminal, "AGAIN_S", 0.0)
    line = terminal.Reading()
    line(Piece("prefill", done=300, total=1200))
    line(Piece("prefill", done=1199, total=1200))
    line.end()
    line.end()
    lines = capsys.readouterr().err.split("\r")
    assert lines[1].startswith("Reading the prompt: 25% of 1200 tokens, ") and lines[1].endswith(" s left")
    assert lines[2].startswith("Reading the prompt: 100% of 1200 tokens, ") and len(lines[2]) >= len(lines[1])
    assert lines[3].strip() == "" and len(lines[3]) >= len(lines[2].rstrip())
    assert lines[4:] == [""]


def test_a_short_prompt_shows_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    line = terminal.Reading()
    line(Piece("prefill", done=1, total=10))
    line.end()
    assert capsys.readouterr().err == ""


def test_speed_is_that_of_what_was_read_now() -> None:
    assert terminal.describe_reading(Piece("prefill", done=600, total=1000, cached=200), 4.0) == (
        "Reading the prompt: 60% of 1000 tokens, 100 tok/s, 4 s left"
    )
    assert terminal.describe_reading(Piece("prefill", done=200, total=1000, cached=200), 4.0) == (
        "Reading the prompt: 20% of 1000 tokens"
    )


URL, MODEL, TOKEN = "http://127.0.0.1:7861", "it's a model/Qwen3 30B", "a-token_of.this~test"
PRINT = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]]))"


@pytest.mark.skipif(sys.platform == "win32", reason="the lines for a POSIX shell are run by one")
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_shell_reads_the_lines_as_they_are_meant(program: str, tmp_path: Path) -> None:
    found = tmp_path / program
    found.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{PRINT}' \"$@\"\n")
    found.chmod(0o755)
    lines = instructions(program, URL, MODEL, TOKEN, windows=False)
    done = subprocess.run(
        ["/bin/sh", "-c", lines], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    environment, words = json.loads(done.stdout)
    if program == "claude":
        assert environment["ANTHROPIC_BASE_URL"] == URL and environment["ANTHROPIC_AUTH_TOKEN"] == TOKEN
        assert environment["ANTHROPIC_MODEL"] == environment["ANTHROPIC_DEFAULT_HAIKU_MODEL"] == MODEL
    elif program == "codex":
        assert words[:2] == ["-m", MODEL] and f"model_providers.moestro.base_url={URL}/v1" in words
        assert environment["MOESTRO_KEY"] == TOKEN and "model_providers.moestro.env_key=MOESTRO_KEY" in words
    else:
        config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
        assert config["model"] == f"moestro/{MODEL}" and MODEL in config["provider"]["moestro"]["models"]
        assert config["provider"]["moestro"]["options"] == {"baseURL": f"{URL}/v1", "apiKey": TOKEN}


def test_powershell_has_its_own_quotes_and_no_token_is_any_key() -> None:
    lines = instructions("claude", URL, MODEL, None, windows=True).splitlines()
    assert lines[0] == f"$env:ANTHROPIC_BASE_URL = '{URL}'" and "$env:ANTHROPIC_AUTH_TOKEN = 'moestro'" in lines
    assert "$env:ANTHROPIC_MODEL = 'it''s a model/Qwen3 30B'" in lines and lines[-1] == "claude"
