"""Files that a command will write for the user: whether they can be written is found out before its work begins."""

import os
from pathlib import Path

from core.errors import MoestroError
from core.system.reading import reason, shown

UNFINISHED = (".part", ".new")  # endings of the files in which results are written before they get their names


def require_new_file(path: Path) -> None:
    """Raises MoestroError, with what to do, unless a new file can be written at `path`. Writes nothing."""
    folder = path.parent
    if not folder.is_dir():
        raise MoestroError(f"There is no folder {shown(folder)} to write into. Create it, or choose another file.")
    for taken in (path, *(path.with_name(path.name + ending) for ending in UNFINISHED)):
        if os.path.lexists(taken):
            raise MoestroError(
                f"{shown(taken)} exists already, and nothing is ever overwritten. Choose another file, or delete it "
                "first."
            )
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        path.unlink()
    except OSError as error:
        raise MoestroError(
            f"No file can be written in {shown(folder)}: {reason(error)}. Choose a folder where you may write."
        ) from None
