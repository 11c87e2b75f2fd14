"""ik_llama.cpp and llama.cpp, from wheels in an environment of their own, with their files of a model."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.harness.process import Session
from bench.harness.run import Run
from bench.models.gguf_file import write_bf16
from core.errors import MoestroError

PACKAGES = {"ik": "ik-llama-cpp-python==0.1.5", "llama": "xllamacpp==2026.10.11549"}
MODULES = {"ik": "ik_llama_cpp", "llama": "xllamacpp"}
NAMES = {"ik": "ik_llama.cpp", "llama": "llama.cpp"}
FILES = {"int4": {"ik": "Q4_0", "llama": "Q4_K_M"}, "bf16": {"ik": "BF16", "llama": "BF16"}}
CONFIGURATIONS = [(True, True), (True, False), (False, True), (False, False)]  # of ik_llama.cpp: repack, flash
TRIED = 256, 24  # tokens of a prompt, and after it, by which one of them is chosen
WORKER = "bench.speed.peer_worker"
Say = Callable[[str], None]


class Peer(NamedTuple):
    """Another program with its file of a model."""

    name: str  # of NAMES
    kind: str  # of the file
    file: Path
    python: Path
    threads: int

    @property
    def title(self) -> str:
        return f"{NAMES[self.name]} {self.kind}"

    def job(self, **switches: Any) -> dict[str, Any]:
        """Of `bench.speed.peer_worker`."""
        return {"peer": self.name, "model": str(self.file), "threads": self.threads, **switches}

    def opened(self, **switches: Any) -> Session:
        return Session(WORKER, self.job(**switches), str(self.python))

    def fastest(self, say: Say) -> dict[str, bool]:
        """Switches with which it reads a prompt and decodes after it in the shortest time, all in memory. Raises
        MoestroError where it does not run."""
        if self.name != "ik":
            return {"mmap": False}
        say(f"trying configurations of {self.title}")
        seconds, (prompt, tokens) = dict[tuple[bool, bool], float](), TRIED
        for repack, flash in CONFIGURATIONS:
            try:
                with self.opened(mmap=False, repack=repack, flash=flash) as session:
                    session.ask(prompt=[5] * 16, tokens=[5])
                    found = session.ask(prompt=[*range(3, 3 + prompt)], tokens=[*range(9, 9 + tokens)])
            except MoestroError as error:  # some of them end with an error on some processors
                say(f"  repack {repack}, flash {flash}: {error}")
                continue
            seconds[repack, flash] = found["prompt_s"] + sum(found["token_s"])
        if not seconds:
            raise MoestroError(f"{self.title} runs in no configuration here. Leave it out: --peers llama.")
        repack, flash = min(seconds, key=seconds.__getitem__)
        return {"mmap": False, "repack": repack, "flash": flash}


def peers_of(
    run: Run, choice: str, model: Path, formats: Sequence[str] = (*FILES,), folder: Path | None = None
) -> dict[str, list[Peer]]:
    """By format: the other programs of a choice, installed, with their files of a Qwen3-MoE checkpoint, written into
    `folder`, by default the run's. No peers where the choice or an answer is none."""
    kept = run.folder()
    names = agreed(choice, python := interpreter(kept / "peers"))
    if names:
        install(python, run.say)
    elif not choice:
        run.say("Other programs are left out: --peers all installs them.")

    def peer(name: str, kind: str) -> Peer:
        return Peer(name, kind, gguf(folder or kept, model, kind, python, run.say), python, run.threads)

    return {format: [peer(name, FILES[format][name]) for name in names] for format in formats}


def agreed(choice: str, python: Path) -> list[str]:
    """The peers of a choice; "" = those that are installed, else those that someone agrees to have installed."""
    if not choice and installed(python):
        choice = "all"
    elif not choice and sys.stdin is not None and sys.stdin.isatty():
        question = f"Compare with ik_llama.cpp and llama.cpp ({', '.join(PACKAGES.values())}, in an environment of "
        answer = input(question + "their own, 400 MB)? [y/N] ")
        choice = "all" if answer.strip().lower() in ("y", "yes") else "none"
    return [*PACKAGES] if choice == "all" else [choice] if choice in PACKAGES else []


def interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def installed(python: Path) -> bool:
    wanted = f"import {', '.join(MODULES.values())}"
    return python.exists() and not subprocess.run([python, "-c", wanted], capture_output=True, check=False).returncode


def install(python: Path, say: Say) -> None:
    """The wheels of all peers, as ik_llama.cpp's quantizer writes the files of both. Raises MoestroError where they
    cannot be had."""
    if installed(python):
        return
    say(f"installing {', '.join(PACKAGES.values())}")
    _run([sys.executable, "-m", "venv", str(python.parent.parent)])
    _run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *PACKAGES.values()])


def gguf(folder: Path, model: Path, kind: str, python: Path, say: Say) -> Path:
    """The model as a GGUF file, in BF16, Q4_0 or Q4_K_M, written unless it is there."""
    file = folder / f"{model.name}.{kind}.gguf"
    if file.exists():
        return file
    if kind == "BF16":
        say(f"writing {file.name}")
        return write_bf16(model, file)
    whole, partial = gguf(folder, model, "BF16", python, say), file.with_suffix(".partial")
    say(f"quantizing {file.name}")
    find = "from ik_llama_cpp import find_quantize_bin as found; print(found())"
    program = _run([str(python), "-c", find]).strip()
    _run([program, str(whole), str(partial), kind, str(os.cpu_count() or 1)])
    return partial.rename(file)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise MoestroError(f"{command[0]} does not start: {error}. --peers none leaves other programs out.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise MoestroError(f"{Path(command[0]).name} failed: {reason}. --peers none leaves other programs out.")
    return done.stdout
