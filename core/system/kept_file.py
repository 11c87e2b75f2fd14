"""A small JSON file with what was measured on this machine: read where it can be, replaced as a whole."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def read(file: Path | None, log: logging.Logger) -> dict[str, Any]:
    """The content of a file; nothing where there is none, or where it cannot be used, which the log says."""
    if file is None:
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.info("%s is not used, and what it had is measured anew: %s", file, error)
        return {}
    return content if isinstance(content, dict) else {}


def replace(file: Path | None, content: Mapping[str, object], log: logging.Logger) -> None:
    """Write a file anew. What another process writes at the same moment may be lost, and is then measured again; so is
    what cannot be written, which the log says."""
    if file is None:
        return
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        log.warning("What was measured is not kept in %s: %s", file, error)
