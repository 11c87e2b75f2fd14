"""Runs the checks of `launch.py accept` one after another and writes one file of what they found."""

import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from app.store.results import write
from bench.accept.checks import Check
from bench.accept.report import NO_TIME
from core import __version__
from core.system.process_tree import end_tree

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED, LATE, LEFT_OUT = "passed", "failed", "took too long", "left out"
TAIL = 12_000  # characters of what a check printed that are kept
BLOCKING = {"CUDA_LAUNCH_BLOCKING": "1"}  # each launch is waited for, so that an error is reported where it was made
SLOWER = 2.0  # so many times as long a check may take then


def run(file: Path, checks: Sequence[Check], minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the checks, none that would not end within `minutes` in all, and those that failed once more with BLOCKING;
    the file is written after each of them, so that it is there whatever happens. Returns what it says."""
    until, found = time.monotonic() + 60 * minutes, list[dict[str, Any]]()
    result: dict[str, Any] = {
        "accept": 1,
        "moestro": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {},
        "versions": {},
        "checks": found,
    }
    for check in checks:
        if reason := check.without() or ("" if time.monotonic() + check.limit_s <= until else NO_TIME):
            found.append({"name": check.name, "outcome": LEFT_OUT, "why": reason})
        else:
            say(f"{check.name}: {check.what}, at most {check.limit_s:.0f} s")
            found.append(made(check))
        one = found[-1]
        for part in ("machine", "versions"):  # of the check that asks for them
            result[part] |= one.get("figures", {}).pop(part, {})
        say(f"  {one['outcome']}" + (f": {one['why']}" if one.get("why") else f" in {one['seconds']:.0f} s"))
        write(file, result)
    for check, one in zip(checks, found, strict=True):
        if one["outcome"] == FAILED:
            one["blocking"] = again(check, one["seconds"], until, say)
            write(file, result)
    return result


def again(check: Check, took_s: float, until: float, say: Callable[[str], None]) -> dict[str, Any]:
    """What comes of a check that failed when each launch is waited for."""
    left_s = until - time.monotonic()
    if left_s < min(check.limit_s, SLOWER * took_s):
        return {"outcome": LEFT_OUT, "why": NO_TIME}
    say(f"{check.name} once more, with {' '.join(f'{name}={value}' for name, value in BLOCKING.items())}")
    found = made(replace(check, limit_s=min(check.limit_s, left_s), environment=check.environment | BLOCKING))
    for part in ("machine", "versions"):
        found["figures"].pop(part, None)
    say(f"  {found['outcome']}" + (f": {found['why']}" if found.get("why") else ""))
    return found


def made(check: Check) -> dict[str, Any]:
    """Run one check, and end it with everything it has started when its limit is over."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, tempfile.TemporaryFile() as output:
        own = {name: value.replace("{folder}", folder) for name, value in check.environment.items()}
        process = subprocess.Popen(
            check.command(Path(folder)),
            cwd=ROOT,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1", **own},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            status: int | None = process.wait(check.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_tree(process)
        output.seek(0)
        text = anonymous(output.read().decode("utf-8", "replace"))
    found: dict[str, Any] = {
        "name": check.name,
        "outcome": LATE if status is None else PASSED if status in check.good else FAILED,
        "seconds": round(time.monotonic() - began_s, 1),
        "limit_s": check.limit_s,
        "status": status,
        "figures": figures(text),
        "output": text[-TAIL:],
    }
    if found["outcome"] == FAILED:
        found["why"] = reason(text) or f"it ended with status {status}"
    if found["figures"].get("left_out"):
        found |= {"outcome": LEFT_OUT, "why": found["figures"].pop("left_out")}
    return found


def figures(text: str) -> dict[str, Any]:
    """The JSON objects that a check printed, taken together: each on a line of its own, or one over several lines to
    the end; for pytest what its last line counts."""
    lines, found = text.strip().splitlines() or [""], dict[str, Any]()
    begin = max((at for at, line in enumerate(lines) if line == "{"), default=0)
    for written in (*(line for line in lines if line.startswith("{")), "\n".join(lines[begin:])):
        try:
            read = json.loads(written)
        except ValueError:
            continue
        found |= read if isinstance(read, dict) else {}
    if found:
        return found
    counted = re.findall(r"(\d+) (passed|failed|skipped|error|deselected)", lines[-1])
    return {what: int(number) for number, what in counted}


def reason(text: str) -> str:
    """The line that says what went wrong: the last one."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1][:500] if lines else ""


def anonymous(text: str) -> str:
    """Without the user's folder, which has their name."""
    home = str(Path.home())
    for written in (home, json.dumps(home)[1:-1]):  # as it is, and within JSON
        text = text.replace(written, "~") if len(home) > 1 else text
    return text


def table(result: Mapping[str, Any]) -> str:
    """The result as text."""
    gpu = result["machine"].get("gpu", "")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [f"Moestro {result['moestro']}, {result['date']}", *(line for line in (gpu, versions) if line)]
    for one in result["checks"]:
        lines.append(f"{one['name']:12} {one['outcome']}" + (f": {one['why']}" if one.get("why") else ""))
        if "blocking" in one:
            lines.append(f"{'':14} each launch waited for: {one['blocking']['outcome']}")
        for name, value in one.get("figures", {}).items():
            if isinstance(value, int | float | str):
                lines.append(f"{'':14} {name}: {f'{value:.4g}' if isinstance(value, float) else value}")
    return "\n".join(lines)
