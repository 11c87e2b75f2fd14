"""The process that mutants live and die in: `python -m tests.fuzz.worker FOLDER`, a line of JSON for each, both ways.

In: {"kind", "seed"} or a whole mutant. Out: {"mutant"} before it is used, so that a hang or a crash can be told of it,
and {"mutant", "verdict"} behind it.
"""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.changes import apply
from tests.fuzz.mutant import Kind, Mutant, Verdict
from tests.fuzz.oracle import judge

ROOM_BYTES = 6 << 30  # address space beyond what is taken at the start


class Bench:
    """Samples, made once, and what each gives when nothing is changed."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._kinds: dict[str, Kind] = {}
        self._whole: dict[tuple[str, str], dict[str, Any]] = {}

    def kind(self, name: str) -> Kind:
        from tests.fuzz.kinds import KINDS, make

        if name not in self._kinds:
            if name in KINDS:
                prepare()
            self._kinds[name] = make(name)
        return self._kinds[name]

    def sample(self, kind: Kind, sample: str) -> Path:
        """The folder of a whole sample; never written into again."""
        path = self._folder / "samples" / kind.name / sample
        if (kind.name, sample) not in self._whole:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            kind.make(sample, path)
            copy = self._copy(path)
            self._whole[kind.name, sample] = kind.use(copy, Mutant(kind.name, sample, ()))
            shutil.rmtree(copy)
        return path

    def drawn(self, name: str, seed: int) -> Mutant:
        """The mutant of a seed: the same every time."""
        kind, rng = self.kind(name), random.Random(f"{name}/{seed}")
        sample = rng.choice(kind.samples)
        return Mutant(name, sample, tuple(kind.draw(rng, sample, self.sample(kind, sample))), seed)

    def judged(self, mutant: Mutant) -> Verdict:
        kind = self.kind(mutant.kind)
        copy = self._copy(self.sample(kind, mutant.sample))
        try:
            apply(mutant.changes, copy)
            return judge(kind, mutant, copy, self._whole[kind.name, mutant.sample])
        finally:
            shutil.rmtree(copy, ignore_errors=True)

    def _copy(self, sample: Path) -> Path:
        self._count += 1
        return Path(shutil.copytree(sample, self._folder / "mutants" / f"{self._count}-{os.getpid()}"))


def limit_memory(room_bytes: int = ROOM_BYTES) -> None:
    """So much more address space and no more, where the system has such limits: who asks for more gets MemoryError."""
    try:
        import resource
    except ImportError:
        return
    with open("/proc/self/statm", encoding="ascii") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + room_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))


def prepare() -> None:
    """One thread, quiet libraries, and none of what loading tries out to be fast on this machine."""
    import torch
    import transformers

    from core.hf import fast_rmsnorm, rotary
    from core.runtime import warmup
    from core.system import process_memory

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    process_memory.gc = SimpleNamespace(collect=lambda: 0, freeze=int, unfreeze=int)  # type: ignore[assignment,attr-defined]
    fast_rmsnorm.ELEMENTS = rotary.ELEMENTS = 512
    warmup.PASSES = 1


def main(folder: Path) -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever prints must not be taken for a reply
    bench = Bench(folder)

    def reply(**words: Any) -> None:
        replies.write(json.dumps(words) + "\n")
        replies.flush()

    limited = False
    for number, line in enumerate(sys.stdin):
        asked = json.loads(line)
        mutant = bench.drawn(asked["kind"], asked["seed"]) if "changes" not in asked else Mutant.of(asked)
        bench.sample(bench.kind(mutant.kind), mutant.sample)
        if not limited:
            gc.freeze()
            limit_memory()
            limited = True
        reply(mutant=mutant.plain())
        reply(mutant=mutant.plain(), verdict=asdict(bench.judged(mutant)))
        if number % 20 == 19:
            gc.collect()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
