"""What `ui --for` prints: run by a shell, it gives the program its address, key and model, and its words as meant."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.clients import PROGRAMS, instructions

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
