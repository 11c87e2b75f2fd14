"""Records programs: `python -m tests.api.recording --clients FOLDER [NAME ...]`, from the root of the repository."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from datetime import date
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from tests.api.recording.canned import Canned
from tests.api.recording.clients import CLIENTS, QUESTION, Client, Run
from tests.api.recording.trim import Trimmer

RECORDINGS = Path(__file__).parents[1] / "recordings"
PROJECT = {"cache.py": "class Cache:\n    '''Keeps what was asked for.'''\n"}
WIDTH = 160  # characters of a line of a recording
MOST_S = 200.0  # a program that has not ended by then is stopped; what it sent is kept


def version(client: Client, installed: Path) -> str:
    """The version of a program's package as installed."""
    if client.installer == "npm":
        return str(json.loads((installed / "node_modules" / client.package / "package.json").read_text())["version"])
    [site] = installed.glob("lib/python*/site-packages")
    return next(one.version for one in distributions(path=[str(site)]) if one.name == client.package)


def environment(client: Client, run: Run) -> dict[str, str]:
    """A bare environment with a home of its own, and no way to a proxy."""
    known = {name: value for name, value in os.environ.items() if name in ("PATH", "SYSTEMROOT", "LANG", "TERM")}
    home = {"HOME": str(run.home), "USERPROFILE": str(run.home), "XDG_CONFIG_HOME": str(run.home / ".config")}
    return {**known, **home, "NO_COLOR": "1", "CI": "1", **client.environment(run)}


def visit(client: Client, installed: Path, url: str, *, talk: bool) -> Run:
    """Run a program against a server, in a home and a project that are gone afterwards. `talk`: show what it says."""
    with tempfile.TemporaryDirectory(prefix="recording-", ignore_cleanup_errors=True) as folder:
        run = Run(installed, Path(folder, "home"), Path(folder, "project"), url)
        for path in (run.home, run.project):
            path.mkdir()
        for name, text in PROJECT.items():
            (run.project / name).write_text(text, encoding="utf-8")
        for command in client.commands(run):
            start(command, run, environment(client, run), talk)
    return run


def record(client: Client, installed: Path, *, talk: bool) -> dict[str, Any]:
    """Run a program against the canned server -> the recording."""
    server = Canned(client.calls)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    run = visit(client, installed, f"http://127.0.0.1:{server.server_port}", talk=talk)
    server.shutdown()
    server.server_close()
    named = {str(run.project): "/project", str(run.home): "~", str(run.home.parent): "/tmp", str(installed): "/client"}
    named |= {run.url.removeprefix("http://"): "127.0.0.1:7860", platform.node(): "host", platform.release(): "kernel"}
    named |= {getpass.getuser(): "user"} if len(getpass.getuser()) > 4 else {}
    trimmer = Trimmer(named, (QUESTION,))
    requests = [trimmer.request(one) for one in server.seen]
    return {
        "client": client.title,
        "package": f"{client.package} ({client.installer})",
        "version": version(client, installed),
        "date": date.today().isoformat(),
        "requests": shared(requests),
    }


def shared(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same, in which the tools of an earlier request are said once: "tools": {"request": NUMBER}."""
    kept: list[dict[str, Any]] = []
    for one in requests:
        body = one["body"]
        if isinstance(body, dict) and body.get("tools"):
            same = [at for at, before in enumerate(requests[: len(kept)]) if _tools(before) == body["tools"]]
            one = {**one, "body": {**body, "tools": {"request": same[0]}}} if same else one
        kept.append(one)
    return kept


def _tools(request: dict[str, Any]) -> Any:
    return request["body"].get("tools") if isinstance(request["body"], dict) else None


def start(command: Sequence[str], run: Run, env: dict[str, str], talk: bool) -> None:
    """Run a command in the project until it ends."""
    out = None if talk else subprocess.DEVNULL
    try:
        subprocess.run(
            command, cwd=run.project, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=MOST_S
        )
    except subprocess.TimeoutExpired:
        print(f"{command[0]} was stopped after {MOST_S:.0f} s")


def written(value: Any, indent: int = 0) -> str:
    """JSON, in which what fits into a line is in one."""
    whole = json.dumps(value, ensure_ascii=False)
    if len(whole) + indent <= WIDTH or not isinstance(value, (dict, list)):
        return whole
    inner, pad = indent + 1, " " * (indent + 1)
    if isinstance(value, list):
        return "[\n" + ",\n".join(pad + written(one, inner) for one in value) + "\n" + " " * indent + "]"
    named = [f"{pad}{json.dumps(key)}: {written(one, inner)}" for key, one in value.items()]
    return "{\n" + ",\n".join(named) + "\n" + " " * indent + "}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.api.recording", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CLIENTS], metavar="NAME", help=f"of {', '.join(CLIENTS)}")
    parser.add_argument("--clients", type=Path, required=True, help="where they are installed, each in a folder NAME")
    parser.add_argument("--talk", action="store_true", help="show what they say")
    parser.add_argument("--url", help="record nothing, and run them against this server, which has the demo loaded")
    told = parser.parse_args()
    folder = told.clients.resolve()
    for name in told.names or [one for one in CLIENTS if (folder / one).is_dir()]:
        if shutil.which("node") is None and CLIENTS[name].installer == "npm":
            raise SystemExit("Install Node.js first.")
        if told.url:
            print(f"-- {name}", flush=True)
            visit(CLIENTS[name], folder / name, told.url, talk=True)
            continue
        recording = record(CLIENTS[name], folder / name, talk=told.talk)
        RECORDINGS.mkdir(exist_ok=True)
        text = written(recording) + "\n"
        (RECORDINGS / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name} {recording['version']}: {len(recording['requests'])} requests, {len(text)} characters")


if __name__ == "__main__":
    main()
