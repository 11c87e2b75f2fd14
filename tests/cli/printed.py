"""What a command prints for programs and for people."""

import json
from typing import Any

import pytest

from app import cli

LAYERS, EXPERTS, K = 3, 16, 2  # of the fixture `trace`


def printed(command: str, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[dict[str, Any], str]:
    assert cli.main([command, *map(str, words), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(lines)
