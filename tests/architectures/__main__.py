"""python -m tests.architectures [FOLDER] > docs/architectures.md: takes an hour. What was found of each type is kept in
FOLDER, its methods in a file of their own, and a run that was broken off goes on from there; the folder is of one
version of everything."""

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.architectures.scan import moe_types
from tests.architectures.table import page
from tests.architectures.trial import RUNS, Outcome, methods_of, try_all


def found(model_type: str, folder: Path | None) -> Outcome:
    """What is found of a type, now or in an earlier run."""
    known = kept(folder, model_type, lambda: asdict(try_all(model_type)))
    outcome = Outcome(**known | {"left_out": tuple(known["left_out"])})
    if outcome.verdict not in RUNS:
        return outcome
    return replace(outcome, methods=kept(folder, f"{model_type}.methods", lambda: methods_of(model_type)))


def kept(folder: Path | None, name: str, find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `find` returns, which is kept as a file of this name."""
    if folder is None:
        return find()
    file = folder / f"{name}.json"
    if not file.exists():
        part = file.with_suffix(".part")
        part.write_text(json.dumps(find()), "utf-8")
        part.replace(file)
    read: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return read


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(page([found(name, folder) for name in moe_types()]))
