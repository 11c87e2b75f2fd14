"""What mutants live and die in: the worker of a `LimitedProcess`.

A request is ["make", a mutant or {"kind", "seed"}], answered by the mutant, or ["judge", mutant], by its verdict.
"""

import gc
import json
import multiprocessing
import os
import random
import shutil
import tempfile
import traceback
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from core.system.limited_process import Answer
from tests.fuzz.changes import apply
from tests.fuzz.mutant import Kind, Mutant, Verdict
from tests.fuzz.oracle import judge


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
                hurry()
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


def hurry() -> None:
    """One thread, quiet libraries, and none of what loading tries out to be fast on this machine."""
    import torch
    import transformers

    from core.runtime import warmup
    from core.system import process_memory

    torch.set_num_threads(1)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    process_memory.gc = SimpleNamespace(collect=lambda: 0, freeze=int, unfreeze=int)  # type: ignore[assignment,attr-defined]
    warmup.PASSES = 1


def prepare(folder: str) -> Answer:
    """In a new process, before anything is imported: its own home and files in `folder`, and nothing is printed."""
    home, nowhere = f"{folder}/home", os.open(os.devnull, os.O_WRONLY)
    os.makedirs(home, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "GRADIO_ANALYTICS_ENABLED": "False", "TOKENIZERS_PARALLELISM": "false"}
    os.environ |= {"HF_HOME": home, "MOESTRO_HOME": home, "TMPDIR": folder}
    tempfile.tempdir = folder
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # engines start processes
    for output in (1, 2):
        os.dup2(nowhere, output)
    bench, count = Bench(Path(folder)), 0

    def answer(request: bytes) -> bytes:
        nonlocal count
        what, asked = json.loads(request)
        try:
            if what == "make":
                mutant = bench.drawn(asked["kind"], asked["seed"]) if "changes" not in asked else Mutant.of(asked)
                bench.sample(bench.kind(mutant.kind), mutant.sample)
                return json.dumps(mutant.plain()).encode()
            count += 1
            if count % 20 == 0:
                gc.collect()
            return json.dumps(asdict(bench.judged(Mutant.of(asked)))).encode()
        except Exception:  # a fault of this package
            return json.dumps({"fault": traceback.format_exc()}).encode()

    return answer
