"""The files that `bench tiers` measures: one model as a checkpoint, as packs and as other programs' files."""

import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness.process import drop, ended_well, measure
from bench.harness.protocol import Job
from bench.harness.run import Run
from bench.models.generate import checkpoint
from bench.models.peers import PACKAGES, Peer, peers_of
from bench.models.sizes import FULL, SMALL
from core.memory.pack.contents import delete

FORMATS = {"bf16": "checkpoint", "int4": "int4-g64"}  # of the packs
DENSE = {"bf16": "checkpoint", "int4": "int4-g64"}  # ... of their layers outside the experts, as loaded
PROMPT = "What does a cache of experts do for a language model?"


@dataclass
class Fixtures:
    """Paths of all files. `peers` has every format that is measured, and the other programs with their files of it."""

    folder: Path
    model: Path
    say: Callable[[str], None]
    peers: Mapping[str, Sequence[Peer]]
    packs: dict[str, Path] = field(default_factory=dict)

    @property
    def threads(self) -> list[int]:
        """One, and as many as this machine has cores."""
        return sorted({1, os.cpu_count() or 1})


def build(run: Run, peers: str, formats: Sequence[str] = (*FORMATS,)) -> Fixtures:
    """Builds the checkpoint, and other programs' files. Existing files are used again."""
    folder = run.folder()
    model = checkpoint(folder, SMALL if run.small else FULL, say=run.say)
    return Fixtures(folder, model, run.say, peers_of(run, peers, model, formats))


def import_packs(fixtures: Fixtures) -> Job:
    """Imports the checkpoint anew into each format of `peers`: seconds, peak memory above the idle process's, sizes."""
    found: Job = {}
    for name in fixtures.peers:
        format = FORMATS[name]
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
    others = {PACKAGES[peer.name] for of in fixtures.peers.values() for peer in of}
    return {
        "device": device_name(torch.device("cpu")),
        "cores": os.cpu_count(),
        "ram_gb": host_memory().total / 1e9,
        "read_ahead_kb": int(ahead) if ahead.strip() else None,
        "versions": {**versions(), **dict(one.split("==") for one in others)},
    }
