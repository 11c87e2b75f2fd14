"""What other programs need to use the model that the dashboard serves: their environment and their command."""

import json
import os
import shlex
from collections.abc import Callable

ANY = "moestro"  # the key, where none is required
Environment = dict[str, str]
Start = tuple[Environment, list[str]]
"""The environment, and the words of the command to start the program with."""


def _claude(url: str, model: str, key: str) -> Start:
    models = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL")  # of answers, and of what goes on beside them
    return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": key, **dict.fromkeys(models, model)}, ["claude"]


def _codex(url: str, model: str, key: str) -> Start:
    options = {
        "model_provider": "moestro",
        "model_providers.moestro.name": "Moestro",
        "model_providers.moestro.base_url": f"{url}/v1",
        "model_providers.moestro.wire_api": "responses",
        "model_providers.moestro.env_key": "MOESTRO_KEY",
    }
    chosen = [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
    return {"MOESTRO_KEY": key}, ["codex", "-m", model, *chosen]


def _opencode(url: str, model: str, key: str) -> Start:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Moestro",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {"name": model}},
    }
    config = {"provider": {"moestro": provider}, "model": f"moestro/{model}", "small_model": f"moestro/{model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, ["opencode"]


PROGRAMS: dict[str, Callable[[str, str, str], Start]] = {"claude": _claude, "codex": _codex, "opencode": _opencode}


def instructions(program: str, url: str, model: str, token: str | None, windows: bool = os.name == "nt") -> str:
    """Lines to paste into a shell (PowerShell on Windows). `url`: of the server, without a path."""
    environment, command = PROGRAMS[program](url, model, token or ANY)
    if windows:  # which would take a bare word for a command
        lines = [f"$env:{name} = {_powershell(value)}" for name, value in environment.items()]
        return "\n".join([*lines, " ".join([command[0], *map(_powershell, command[1:])])])
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join([*lines, shlex.join(command)])


def _powershell(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
