"""Adds throw-away metrics to the table and follows them: record, database, export, live frame, statistics, docs, and
for one that the cache counts, simulation and what-if table.

A program, run by tests/test_metrics.py in a process of its own, as the metrics must be there before anything imports
`core.metrics`. Its argument is a folder with a database of an earlier version. Prints what it found as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import threading
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

CORE = Path(__file__).resolve().parent.parent / "core"
ENTRIES = """    heat: float = field(
        default=0.0, metadata=metric("K", "How warm it was.", reduce="max", frame=True, label="warm")
    )
    fresh: int = field(default=0, metadata=metric("experts", "Prefetched experts that were asked for."))
"""
ADDED = {  # module -> its file and what stands before which line
    "core.metrics.record": (CORE / "metrics" / "record.py", {"    predict_ms: float = field(": ENTRIES}),
    "core.cache.counts": (
        CORE / "cache" / "counts.py",
        {
            "    evicted_bytes: int = 0\n": "    fresh: int = 0\n",
            "        self.spared.append(ticket)": "        self.fresh += 1\n",
        },
    ),
}


class Loader(SourceFileLoader):
    """Loads a module with its additions."""

    def get_code(self, fullname: str) -> CodeType:
        file, lines = ADDED[fullname]
        source = file.read_text(encoding="utf-8")
        for before, added in lines.items():
            assert source.count(before) == 1
            source = source.replace(before, added + before)
        return compile(source, str(file), "exec")


class Finder:
    """Finds that loader for the modules with additions, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in ADDED:
            return None
        file = str(ADDED[name][0])
        return importlib.util.spec_from_file_location(name, file, loader=Loader(name, file))


def follow(folder: Path) -> dict[str, Any]:
    """What becomes of a heat of 2.5, 4.5 and 3.0 K in three passes."""
    import numpy as np

    from app.cli import metrics
    from app.server import frames
    from app.services.exports import archive
    from app.store import Store
    from core.engine.answer import AnswerBuilder
    from core.engine.sequence import Sequence, Start, Stop
    from core.runtime.kv_cache import SequenceKV
    from core.runtime.telemetry import Telemetry
    from core.types import Memory, ModelShape, StepRecord

    shape, memory = ModelShape(layers=1, experts=2, top_k=1, hidden=4, expert_bytes=8), Memory(*[0] * 10)
    ids, one, outcome = np.zeros((1, 1, 1), np.int16), np.zeros(1, np.int16), np.zeros(1, np.uint8)
    steps = [
        StepRecord(n, "decode", 1, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, ids, one, one, outcome, heat=heat)  # type: ignore[call-arg]
        for n, heat in enumerate((2.5, 4.5, 3.0))
    ]
    store = Store(folder)
    chat = min(each.id for each in store.chats.all())
    before = [step.heat for step in store.steps.records(chat=chat)]  # type: ignore[attr-defined]
    load = store.steps.add_load("demo", {}, {}, shape, {})
    telemetry = Telemetry(shape)
    stop = Stop(set(), 9, False, threading.Event())
    answer = AnswerBuilder(None, Sequence(1, [0], Start(SequenceKV(None)), None, stop, None), 0.0)  # type: ignore[arg-type]
    for step in steps:
        store.steps.add(load, None, None, step, {})
        telemetry.add(step)
        answer.count(step)
    with zipfile.ZipFile(archive.write(store, folder / "export.zip", load=load)) as export:
        head, *rows = [line.split(",") for line in export.read("tokens.csv").decode().splitlines()]
        described = json.loads(export.read("manifest.json"))["definitions"]["tokens"]
    frame = telemetry.frame(0, 9, [0, 0], memory, busy=False, emulated=False, link_limit_gbps=1.0)
    header, arrays = frames.decode(frames.encode(frame))
    found = {
        "before": before,
        "record": [step.heat for step in store.steps.records(load=load)],  # type: ignore[attr-defined]
        "csv": [float(row[head.index("heat")]) for row in rows],
        "described": described["heat"],
        "frame": arrays["heat"].tolist(),
        "listed": next(each for each in header["arrays"] if each["name"] == "heat"),
        "answer": answer.stats(memory, seed=0).as_dict()["heat"],
        "docs": next(line for line in metrics.reference().splitlines() if line.startswith("| `heat` |")),
    }
    store.close()
    return found | simulated()


def simulated() -> dict[str, Any]:
    """Where the metric that the cache counts is after the replay of a trace with a prefetcher that is always right."""
    import csv

    import numpy as np

    from app.cli.simulate_prefetch import summary
    from app.services.analysis.whatif import About, Bound, Table, prefetched
    from app.services.analysis.whatif_csv import to_csv
    from core.profile.trace import ArrayTrace
    from core.simulate import Clock, Config
    from core.simulate.prefetchers import ORACLE, TimedConfig, timed

    clock = Clock(compute_ms=8.0, load_ms=1.0, expert_ms=1.0)
    trace = ArrayTrace(np.arange(12).reshape(6, 2, 1) % 4, 4)
    [result] = timed(trace, [TimedConfig(Config("lru", 4), ORACLE)], clock, 8, processes=1)
    row = prefetched(result, 8, None)
    about = About("", "", 6, 2, 4, 1, "layer", "empty", 8, None, "")
    lines = to_csv(Table(about, (row,), (Bound(4, None, None, None, None),))).splitlines()
    [cells] = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {
        "replayed": result.figures["fresh"],
        "used_or_late": result.figures["prefetch_used"] + result.figures["prefetch_late"],
        "json": summary(result)["sums"]["fresh"],  # type: ignore[index]
        "whatif": row.more["fresh"] * 6,
        "whatif_csv": float(cells["fresh_per_token"]) * 6,
    }


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    print(json.dumps(follow(Path(sys.argv[1]))))
