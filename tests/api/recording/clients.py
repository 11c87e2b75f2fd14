"""The programs that are recorded: which package has each, how it is told of a server, and what it is asked.

Each is installed on its own below the folder given as --clients: those of npm by `npm install --prefix FOLDER/NAME
PACKAGE@latest`, those of pip into a virtual environment FOLDER/NAME. None of them needs a login for what it does here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.api.recording import scripts
from tests.api.recording.canned import MODEL

QUESTION = "Read cache.py and say in one sentence what it is for."
KEY = "no-key"


@dataclass(frozen=True, slots=True)
class Run:
    """Where a program runs: the folder it is installed in, a home of its own, the project, and the server."""

    installed: Path
    home: Path
    project: Path
    url: str

    def write(self, name: str, text: str | Mapping[str, Any]) -> Path:
        """A file of the program's home."""
        path = self.home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text if isinstance(text, str) else json.dumps(text), encoding="utf-8")
        return path

    def node(self, name: str) -> str:
        return str(self.installed / "node_modules" / ".bin" / name)

    def python(self, name: str) -> str:
        return str(self.installed / "bin" / name)


@dataclass(frozen=True, slots=True)
class Client:
    """A program. `commands` prepares a run and says what to start, one after the other; `calls` = the tools of it that
    the canned server calls, with their arguments; `environment` is added to a bare one."""

    title: str
    package: str
    installer: str
    commands: Callable[[Run], list[list[str]]]
    calls: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Callable[[Run], Mapping[str, str]] = lambda run: {}


def codex(run: Run) -> list[list[str]]:
    run.write(
        ".codex/config.toml",
        f'model = "{MODEL}"\nmodel_provider = "moestro"\n[model_providers.moestro]\nname = "Moestro"\n'
        f'base_url = "{run.url}/v1"\nwire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n',
    )
    return [[run.node("codex"), "exec", "--skip-git-repo-check", "--sandbox", "read-only", QUESTION]]


def claude_code(run: Run) -> list[list[str]]:
    return [[run.node("claude"), "-p", QUESTION, "--model", MODEL, "--allowedTools", "Read"]]


def claude_environment(run: Run) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": run.url,
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
    }


def opencode(run: Run) -> list[list[str]]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Moestro",
        "options": {"baseURL": f"{run.url}/v1", "apiKey": KEY},
        "models": {MODEL: {"name": MODEL}},
    }
    run.write(".config/opencode/opencode.json", {"provider": {"moestro": provider}, "autoupdate": False})
    return [[run.node("opencode"), "run", "--model", f"moestro/{MODEL}", QUESTION]]


def cline(run: Run) -> list[list[str]]:
    told = ["--provider", "openai", "--apikey", KEY, "--modelid", MODEL, "--baseurl", f"{run.url}/v1"]
    return [[run.node("cline"), "auth", *told], [run.node("cline"), "--yolo", QUESTION]]


def continue_(run: Run) -> list[list[str]]:
    config = run.write(
        "config.yaml",
        f"name: moestro\nversion: 1.0.0\nschema: v1\nmodels:\n  - name: {MODEL}\n    provider: openai\n"
        f"    model: {MODEL}\n    apiBase: {run.url}/v1\n    apiKey: {KEY}\n    roles: [chat]\n",
    )
    return [[run.node("cn"), "--config", str(config), "-p", QUESTION]]


def aider(run: Run) -> list[list[str]]:
    quiet = ["--no-git", "--no-check-update", "--no-analytics", "--no-show-model-warnings", "--no-pretty", "--yes"]
    ask = ["--model", f"openai/{MODEL}", "--openai-api-base", f"{run.url}/v1", "--openai-api-key", KEY]
    return [[run.python("aider"), *ask, *quiet, "--message", "/ask What is cache.py for?", "cache.py"]]


def llm(run: Run) -> list[list[str]]:
    run.write(
        "llm/extra-openai-models.yaml",
        f"- model_id: moestro\n  model_name: {MODEL}\n  api_base: {run.url}/v1\n  supports_tools: true\n"
        "  supports_schema: true\n",
    )
    ask = [run.python("llm"), "-m", "moestro", "--key", KEY, "--no-log"]
    function = "def read_file(path: str) -> str:\n    'Read a file.'\n    return open(path).read()\n"
    return [
        [*ask, "-s", "Be brief.", "Why do caches work?"],
        [*ask, "--functions", function, QUESTION],
        [*ask, "--schema", "name, age int", "Invent a dog."],
    ]


def script(text: str) -> Callable[[Run], list[list[str]]]:
    """Of a package without a command: a script in Python, told the server's address and the model."""
    return lambda run: [[run.python("python"), str(run.write("script.py", text)), run.url, MODEL]]


def node_script(text: str) -> Callable[[Run], list[list[str]]]:
    """The same in JavaScript, which finds packages beside the script."""

    def commands(run: Run) -> list[list[str]]:
        (path := run.installed / "script.mjs").write_text(text, encoding="utf-8")
        return [["node", str(path), run.url, MODEL]]

    return commands


SHELL = {"command": "cat cache.py"}
CLIENTS = {
    "codex": Client(
        "Codex", "@openai/codex", "npm", codex, {"exec_command": {"cmd": "cat cache.py"}, "shell_command": SHELL}
    ),
    "claude": Client(
        "Claude Code",
        "@anthropic-ai/claude-code",
        "npm",
        claude_code,
        {"Read": {"file_path": "cache.py"}},
        claude_environment,
    ),
    "opencode": Client("opencode", "opencode-ai", "npm", opencode, {"read": {"filePath": "cache.py"}}),
    "cline": Client(
        "Cline",
        "cline",
        "npm",
        cline,
        {
            "read_files": {"files": [{"path": "cache.py"}]},
            "submit_and_exit": {"summary": "It keeps what was asked for.", "verified": True},
        },
    ),
    "continue": Client("Continue", "@continuedev/cli", "npm", continue_, {"Read": {"filepath": "cache.py"}}),
    "aider": Client("aider", "aider-chat", "pip", aider),
    "llm": Client(
        "llm",
        "llm",
        "pip",
        llm,
        {"read_file": {"path": "cache.py"}},
        lambda run: {"LLM_USER_PATH": str(run.home / "llm")},
    ),
    "litellm": Client(
        "LiteLLM",
        "litellm",
        "pip",
        script(scripts.LITELLM),
        environment=lambda run: {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    "librechat": Client("LibreChat", "@librechat/agents", "npm", node_script(scripts.LIBRECHAT)),
    "aisdk": Client(
        "AI SDK", "@ai-sdk/openai-compatible", "npm", node_script(scripts.AI_SDK), {"look": {"at": "cache.py"}}
    ),
    "openwebui": Client("Open WebUI", "open-webui", "pip", script(scripts.OPEN_WEBUI)),
}
