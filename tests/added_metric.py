"""Adds a throw-away metric to the table and follows it: record, database, export, live frame, statistics, docs.

A program, run by tests/test_metrics.py in a process of its own, as the metric must be there before anything imports
`core.metrics`. Its argument is a folder with a database of an earlier version. Prints what it found as JSON.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import zipfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

TABLE = Path(__file__).resolve().parent.parent / "core" / "metrics.py"
BEFORE = "    predict_ms: float = field("
ENTRY = """    heat: float = field(
        default=0.0, metadata=metric("K", "How warm it was.", reduce="max", frame=True, label="warm")
    )
"""


class Loader(SourceFileLoader):
    """Loads core/metrics.py with one more entry."""

    def get_code(self, fullname: str) -> CodeType:
        source = TABLE.read_text(encoding="utf-8")
        assert source.count(BEFORE) == 1
        return compile(source.replace(BEFORE, ENTRY + BEFORE), str(TABLE), "exec")


class Finder:
    """Finds that loader for core.metrics, and nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "core.metrics":
            return None
        return importlib.util.spec_from_file_location(name, TABLE, loader=Loader(name, str(TABLE)))


def follow(folder: Path) -> dict[str, Any]:
    """What becomes of a heat of 2.5, 4.5 and 3.0 K in three passes."""
    import numpy as np

    from app.cli import metrics
    from app.exports import archive
    from app.server import frames
    from app.store import Store
    from core.runtime.telemetry import Telemetry
    from core.session.answer import AnswerBuilder
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
    answer = AnswerBuilder(None, [0], 9, 0.0, limited_by_context=False)  # type: ignore[arg-type]
    for step in steps:
        store.steps.add(load, None, None, step, {})
        telemetry.add(step)
        answer.count(step)
    with zipfile.ZipFile(archive.write(store, folder / "export.zip", load=load)) as export:
        head, *rows = [line.split(",") for line in export.read("tokens.csv").decode().splitlines()]
        described = json.loads(export.read("manifest.json"))["definitions"]["tokens"]
    frame = telemetry.frame(0, 9, [0, 0], memory, busy=False, emulated=False, link_peak_gbps=1.0)
    header, arrays = frames.decode(frames.encode(frame))
    found = {
        "before": before,
        "record": [step.heat for step in store.steps.records(load=load)],  # type: ignore[attr-defined]
        "csv": [float(row[head.index("heat")]) for row in rows],
        "described": described["heat"],
        "frame": arrays["heat"].tolist(),
        "listed": next(each for each in header["arrays"] if each["name"] == "heat"),
        "answer": answer.stats(cancelled=False, memory=memory, seed=0).as_dict()["heat"],
        "docs": next(line for line in metrics.reference().splitlines() if line.startswith("| `heat` |")),
    }
    store.close()
    return found


if __name__ == "__main__":
    sys.meta_path.insert(0, Finder)  # type: ignore[arg-type]
    print(json.dumps(follow(Path(sys.argv[1]))))
