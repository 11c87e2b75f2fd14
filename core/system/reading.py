"""Bounded reads of small untrusted files: never a device or a pipe, never more than a limit, strictly parsed.

Every failure is a MoestroError worded for the user. Standard library only.
"""

import io
import json
import math
import os
import stat
from pathlib import Path, PureWindowsPath
from typing import Any

from core.errors import ModelError, MoestroError

CONFIG_BYTES = 16 << 20  # maximum size of a config, a manifest or a list of settings
INDEX_BYTES = 256 << 20  # ... and of a tensor index, a header, or a tokenizer
DEPTH = 64  # maximum nesting of lists and objects in a JSON file
KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)

Refusal = type[MoestroError]


class BadJson(ValueError):
    """A problem of a JSON text, worded as the end of a sentence about its file."""


def open_regular(path: Path | str, error: Refusal = ModelError) -> io.BufferedReader:
    """Open a regular file, or a link to one, for reading bytes; does not wait for a pipe's writer.

    Raises `error` when the file does not exist, is not regular, or cannot be opened.
    """
    try:
        _require_regular(os.stat(path), path, error)  # opening a device may already have side effects
        fd = os.open(path, FLAGS)
        try:
            _require_regular(os.fstat(fd), path, error)
            return open(fd, "rb")
        except BaseException:
            os.close(fd)
            raise
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        raise error(unreadable(path, problem)) from None


def require_regular(path: Path | str, limit_bytes: int | None = None, error: Refusal = ModelError) -> os.stat_result:
    """The stat result of a regular file, or of a link's target.

    Raises `error` when it is not regular, larger than `limit_bytes`, or not accessible.
    """
    try:
        found = os.stat(path)
    except (OSError, ValueError) as problem:
        raise error(unreadable(path, problem)) from None
    _require_regular(found, path, error)
    if limit_bytes is not None and found.st_size > limit_bytes:
        raise error(too_large(path, found.st_size, limit_bytes))
    return found


def read_bytes(path: Path | str, limit_bytes: int, error: Refusal = ModelError) -> bytes:
    """A regular file's bytes. Raises `error`, also when it has more than `limit_bytes`."""
    with open_regular(path, error) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            data = file.read(size + 1) if size <= limit_bytes else b""
            if len(data) > size:  # it grows, or is a virtual system file, which reports size 0
                data += file.read(limit_bytes + 1 - len(data))
        except OSError as problem:
            raise error(f"{shown(path)} cannot be read: {reason(problem)}. Check the disk.") from None
    if size > limit_bytes or len(data) > limit_bytes:
        raise error(too_large(path, max(size, len(data)), limit_bytes))
    return data


def read_text(path: Path | str, limit_bytes: int, error: Refusal = ModelError) -> str:
    """A regular file's UTF-8 text. Raises `error` as `read_bytes` does, and when it is not UTF-8."""
    data = read_bytes(path, limit_bytes, error)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{shown(path)} is damaged: byte {problem.start:,} is not UTF-8 text.") from None


def read_json(path: Path | str, limit_bytes: int = CONFIG_BYTES, nonfinite: bool = False) -> Any:
    """A regular file's JSON. Raises ModelError as `read_text` and `parse_json` do."""
    text = read_text(path, limit_bytes)
    try:
        return parse_json(text, nonfinite=nonfinite)
    except BadJson as problem:
        raise ModelError(f"{shown(path)} is damaged: {problem}.") from None


def parse_json(text: str | bytes, nonfinite: bool = False) -> Any:
    """Standard JSON with unique keys in each object and at most DEPTH levels.

    Raises BadJson for any other text. NaN and Infinity, which Python and some configs of transformers write, are
    accepted only if `nonfinite`.
    """
    try:
        text = text.decode("utf-8") if isinstance(text, bytes) else text
        found = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float if nonfinite else _refuse_constant,
            parse_float=float if nonfinite else _finite,
        )
    except BadJson:
        raise
    except RecursionError:
        raise BadJson(f"its JSON is nested deeper than {DEPTH} levels") from None
    except UnicodeDecodeError as problem:
        raise BadJson(f"byte {problem.start:,} is not UTF-8 text") from None
    except json.JSONDecodeError as problem:
        raise BadJson(f"line {problem.lineno} is not JSON ({problem.msg})") from None
    except ValueError:  # Python's limit of integer digits
        raise BadJson("one of its numbers has thousands of digits") from None
    _require_shallow(found, "\\ud" in text or "\\uD" in text or not _whole(text))
    return found


def is_file_name(name: str) -> bool:
    """Whether a name read from a file names a file in the same folder, also on Windows: no folder, no drive, no NUL."""
    return PureWindowsPath(name).name == name and name not in ("", "..") and "\0" not in name


def shown(path: Path | str) -> str:
    """A path as printable text, also where its bytes are not UTF-8."""
    return os.fspath(path).encode("utf-8", "replace").decode("utf-8")


def unreadable(path: Path | str, problem: Exception) -> str:
    """Error text for a file that the system refuses to read."""
    return (
        f"{shown(path)} cannot be read: {reason(problem)}. Check that it is there, the disk, and your permissions "
        "for it."
    )


def too_large(path: Path | str, size: int, limit_bytes: int) -> str:
    """Error text for a file above its size limit."""
    return (
        f"{shown(path)} is {size:,} bytes large, and such a file has {limit_bytes:,} at most. It is damaged, or "
        "not what its name says."
    )


def reason(problem: Exception) -> str:
    """The system's message, without its number and the path."""
    return (problem.strerror if isinstance(problem, OSError) else None) or str(problem) or type(problem).__name__


def irregular(mode: int) -> str:
    """What a thing of this `st_mode` is, as "a pipe"; "" = a regular file."""
    if stat.S_ISREG(mode):
        return ""
    return next((words for test, words in KINDS if test(mode)), "something else")


def _whole(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _require_regular(found: os.stat_result, path: Path | str, error: Refusal) -> None:
    if kind := irregular(found.st_mode):
        raise error(f"{shown(path)} is not a file but {kind}, and is not read. Put the real file in its place.")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise BadJson(f"it has {name[:80]!r} twice in one object")
            seen.add(name)
    return found


def _refuse_constant(word: str) -> float:
    raise BadJson(f"it has {word} where a number belongs")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise BadJson(f"the number {digits[:40]} is too large")
    return number


def _require_shallow(found: Any, halves: bool) -> None:
    """Check the depth level by level, without recursion. `halves`: also reject unpaired surrogates."""
    level, depth = [found], 0
    while level:
        if halves and not all(_whole(each) for each in level if isinstance(each, str)):
            raise BadJson("its text has half of a surrogate pair, which is no character")
        inside: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                inside += [*each, *each.values()] if halves else each.values()
            elif isinstance(each, list):
                inside += each
        depth += any(isinstance(each, (dict, list)) for each in level)
        if depth > DEPTH:
            raise BadJson(f"its JSON is nested deeper than {DEPTH} levels")
        level = inside
