"""The files that `bench tiers` measures: one model as a checkpoint, as packs and as GGUF files."""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np

from bench.harness.process import drop, ended_well, measure
from bench.harness.protocol import Job
from bench.models.generate import checkpoint
from bench.models.sizes import FULL, SMALL
from core.errors import MoestroError
from core.memory.pack.contents import delete

FORMATS = {"bf16": "checkpoint", "int4": "int4-g64"}  # of the packs
DENSE = {"bf16": "checkpoint", "int4": "int4-g64"}  # ... of their layers outside the experts, as loaded
GGUF = {"bf16": "BF16", "int4": "Q4_K_M"}  # ... of the GGUF files compared with them
PROMPT = "What does a cache of experts do for a language model?"
ALIKE = 0.99  # least cosine of llama.cpp's logits with transformers'


@dataclass
class Fixtures:
    """Paths of all files. `llama` is the interpreter with llama_cpp; if it is "", `without` says why there is none."""

    folder: Path
    model: Path
    say: Callable[[str], None]
    llama: str = ""
    without: str = ""
    gguf: dict[str, Path] = field(default_factory=dict)
    packs: dict[str, Path] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def threads(self) -> list[int]:
        """One, and as many as this machine has cores."""
        return sorted({1, os.cpu_count() or 1})


def build(folder: Path, small: bool, llama: str, say: Callable[[str], None]) -> Fixtures:
    """Builds the checkpoint, and the GGUF files if llama.cpp is available. Existing files are used again."""
    folder.mkdir(parents=True, exist_ok=True)
    fixtures = Fixtures(folder, checkpoint(folder, SMALL if small else FULL, say=say), say)
    fixtures.llama, fixtures.without = find_llama(llama)
    if fixtures.llama:
        _gguf_files(fixtures)
    return fixtures


def find_llama(asked: str) -> tuple[str, str]:
    """(interpreter that can import llama_cpp, or "", and why there is none)."""
    if not asked:
        here = importlib.util.find_spec("llama_cpp") is not None
        return (sys.executable, "") if here else ("", "llama_cpp is not installed, and no --llama PYTHON was given")
    try:
        done = subprocess.run([asked, "-c", "import llama_cpp"], capture_output=True, text=True, check=False)
    except OSError as error:
        raise MoestroError(f"--llama {asked} does not start: {error}. Name a Python interpreter.") from None
    if done.returncode:
        raise MoestroError(
            f"--llama {asked} cannot import llama_cpp. Install llama-cpp-python for it: "
            f"{asked} -m pip install llama-cpp-python"
        )
    return asked, ""


def _gguf_files(fixtures: Fixtures) -> None:
    from bench.models.gguf_file import write_bf16

    for name, kind in GGUF.items():
        fixtures.gguf[name] = fixtures.folder / f"{fixtures.model.name}.{kind}.gguf"
    whole, small = fixtures.gguf["bf16"], fixtures.gguf["int4"]
    if not whole.exists():
        fixtures.say(f"writing {whole.name}")
        write_bf16(fixtures.model, whole)
    if not small.exists():
        fixtures.say(f"quantizing {small.name} with llama.cpp")
        partial = small.with_suffix(".partial")
        ended_well(
            measure(
                "bench.speed.llama",
                {"kind": "quantize", "source": str(whole), "target": str(partial), "threads": fixtures.threads},
                [],
                fixtures.llama,
                cold=False,
            ),
            "Quantizing",
        )
        partial.rename(small)


def check_gguf(fixtures: Fixtures) -> Job:
    """Compares llama.cpp's reading of the BF16 file with transformers' of the checkpoint, over the tokens of one text:
    the mean cosine of their logits, and how often both have the same likeliest token. Raises MoestroError when they
    differ."""
    ids = [int(i) for i in np.random.default_rng(0).integers(3, 4000, 24)]
    theirs = ended_well(
        measure(
            "bench.speed.llama",
            {"kind": "logits", "model": str(fixtures.gguf["bf16"]), "ids": ids},
            [],
            fixtures.llama,
            cold=False,
        ),
        "llama.cpp",
    )
    ours = ended_well(
        measure("bench.speed.worker", {"kind": "logits", "model": str(fixtures.model), "ids": ids}, [], cold=False),
        "transformers",
    )
    fixtures.versions["llama_cpp_python"] = theirs["version"]
    a, b = np.array(theirs["logits"]), np.array(ours["logits"])
    cosine = float(((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).mean())
    if not cosine >= ALIKE:
        raise MoestroError(
            f"llama.cpp computes something else from {fixtures.gguf['bf16']} than transformers from the "
            f"checkpoint (cosine of the logits {cosine:.3f}). Delete the file and try again."
        )
    return {"tokens": len(ids), "cosine": cosine, "same_likeliest": float((a.argmax(1) == b.argmax(1)).mean())}


def import_packs(fixtures: Fixtures) -> Job:
    """Imports the checkpoint anew into each format: seconds, peak memory above the idle process's, sizes."""
    found: Job = {}
    for name, format in FORMATS.items():
        pack = fixtures.packs[name] = fixtures.folder / f"{fixtures.model.name}.{name}.pack"
        for old in (pack, Path(f"{pack}.partial")):
            if old.exists():
                delete(old)
        fixtures.say(f"importing to {name}")
        done = ended_well(
            measure(
                "bench.speed.worker",
                {"kind": "import", "source": str(fixtures.model), "out": str(pack), "format": format},
                [fixtures.model],
            ),
            f"Import to {name}",
        )
        found[name] = {
            "seconds": done["seconds"],
            "rss_mb": (done["peak_high"] - done["idle_bytes"]) / 1e6,
            "idle_mb": done["idle_bytes"] / 1e6,
            "dense_mb": (pack / "model.safetensors").stat().st_size / 1e6,
            "pack_mb": sum(f.stat().st_size for f in pack.iterdir()) / 1e6,
            "format": format,
        }
    return found


def disk_gbps(pack: Path, seconds: float = 0.7, readers: int = 2) -> dict[str, float]:
    """GB/s of reading experts from disk in random order, as the engine reads them, with one thread and with two."""
    from core.memory.pack import PackReader
    from core.memory.pages import aligned

    drop([pack])
    reader, found = PackReader(pack), {}
    try:
        for count in range(1, readers + 1):
            order = random.Random(count).choices(range(reader.manifest.total), k=1 << 16)
            until, moved = time.perf_counter() + seconds, [0] * count

            def read(
                number: int,
                count: int = count,
                order: list[int] = order,
                until: float = until,
                moved: list[int] = moved,
            ) -> None:
                buffer = aligned(reader.padded_bytes)
                for eid in order[number::count]:
                    if time.perf_counter() > until:
                        return
                    reader.read_into(eid, buffer)
                    moved[number] += reader.padded_bytes

            began_s = time.perf_counter()
            threads = [threading.Thread(target=read, args=(i,)) for i in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found[f"{count} thread{'s'[: count > 1]}"] = sum(moved) / (time.perf_counter() - began_s) / 1e9
    finally:
        reader.close()
    return found


def machine(fixtures: Fixtures) -> Job:
    """The machine on which these figures were measured."""
    import torch

    from core.engine.manifest import device_name, versions
    from core.system.memory_limits import host_memory

    ahead = ""
    try:
        number = os.stat(fixtures.folder).st_dev
        ahead = (Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}") / "queue" / "read_ahead_kb").read_text()
    except (OSError, AttributeError):
        pass  # another system, or a file system without a device
    if fixtures.gguf:
        fixtures.versions["gguf"] = version("gguf")
    return {
        "device": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "ram_gb": host_memory().total / 1e9,
        "read_ahead_kb": int(ahead) if ahead.strip() else None,
        "versions": {**versions(), **fixtures.versions},
    }
