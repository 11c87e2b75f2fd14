"""python -m tests.architectures [FOLDER] > docs/architectures.md: takes half an hour. What was found of each type is
kept in FOLDER, and a run that was broken off goes on from there; the folder is of one version of everything."""

import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from tests.architectures.scan import moe_types
from tests.architectures.table import page
from tests.architectures.trial import Outcome, try_all


def found(model_type: str, folder: Path | None) -> Outcome:
    """What `try_all` finds, or found in an earlier run."""
    if folder is None:
        return try_all(model_type)
    kept = folder / f"{model_type}.json"
    if not kept.exists():
        part = kept.with_suffix(".part")
        part.write_text(json.dumps(asdict(try_all(model_type))), "utf-8")
        part.replace(kept)
    known = json.loads(kept.read_text("utf-8"))
    return Outcome(**known | {"left_out": tuple(known["left_out"])})


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(page([found(name, folder) for name in moe_types()]))
