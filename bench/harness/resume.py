"""What a long bench has measured so far, on disk row by row, so that it goes on where it broke off."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class KeptRows:
    """Rows and notes in one file of JSON lines. The first line says what is `measured` and holds the notes; a file of
    another measurement is discarded, and so is a last line that was torn."""

    def __init__(self, file: Path, measured: Mapping[str, object]) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file
        self._head: Row = {"measured": json.loads(json.dumps(measured))}
        self.rows: list[Row] = []
        head, *lines = file.read_text("utf-8").splitlines() if file.exists() else ["{}"]
        if (old := json.loads(head)).get("measured") == self._head["measured"]:
            self._head = old
            self.rows = [json.loads(line) for line in lines if line.endswith("}")]
        self._write()

    def note(self, name: str, make: Callable[[], Any], anew: bool = False) -> Any:
        """The value noted under a name; the first time, or `anew`, what `make` returns."""
        if anew or name not in self._head:
            self._head[name] = make()
            self._write()
        return self._head[name]

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row; it is in the file when this returns."""
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(dict(row))

    def done(self) -> None:
        """Everything was measured: the next run starts anew."""
        self._file.unlink(missing_ok=True)

    def _write(self) -> None:
        self._file.write_text("".join(json.dumps(one) + "\n" for one in (self._head, *self.rows)), "utf-8")
