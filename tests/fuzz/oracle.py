"""What became of a mutant: refused in clear words, used with the same result, or with one that the file explains."""

import re
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from core.errors import MoestroError
from tests.fuzz.mutant import Kind, Mutant, Verdict

ROOT = Path(__file__).resolve().parents[2]
INTERNAL = re.compile(
    r"Traceback|<class '|object at 0x|\b(?:Key|Type|Value|Index|Attribute|Runtime|Assertion|Recursion|Overflow|OS|"
    r"Unicode\w*|Safetensor|Validation|Template|Undefined)Error\b|NoneType|"
    r"'(?:str|int|float|list|dict|bool|tuple)' object|"
    r"unexpected keyword|positional argument|has no attribute|list index|not subscriptable|not iterable|"
    r"out of range\b(?! \d+\.\.\d+| at line \d)|"  # but "Offset 60 out of range 316..4092", and a number in JSON
    r"not supported between|\[Errno|errno|"
    r"torch\.\w|site-packages|(?<!launch)\.py\b|dtype\(|\bnp\.\w|Tensor\b|kwargs|Cannot copy|"
    r"size mismatch|max recursion|__(?:init|class|mro|new|call|getattr\w*)__|must be real number|unhashable|"
    r"values to unpack|cannot unpack non|invalid literal|could not convert"
)
ENDS = (".", "!", "?", ".)", ".'", '."')


def unclear(message: str, folder: Path) -> str:
    """What is wrong with a message meant for the user, "" if nothing: it is a sentence, names no file of ours but the
    one that was given, and quotes nothing of Python's."""
    text = message.replace(str(folder), "MODEL")
    if not text.strip():
        return "there is no message"
    if len(text) > 2000:
        return f"the message has {len(text)} characters"
    if tempfile.gettempdir() in text:
        return "it names a temporary path"
    if found := INTERNAL.search(text):
        return f"it says {found[0]!r}"
    if not text.rstrip().endswith(ENDS):
        return "it does not end as a sentence"
    return ""


def innermost(error: BaseException) -> str:
    """The last frame of our own, and the last of all."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        f
        for f in frames
        if f.filename.startswith(str(ROOT)) and "/tests/fuzz/" not in f.filename and "/.venv/" not in f.filename
    ]
    told = [
        f"{re.sub(r'.*site-packages/', '', f.filename.removeprefix(f'{ROOT}/'))}:{f.lineno} {f.name}"
        for f in (*frames[-1:], *ours[-1:])
    ]
    return " < ".join(dict.fromkeys(told))


def difference(seen: dict[str, Any], whole: dict[str, Any]) -> str:
    """What differs between two observations, "" if nothing does; NaN equals NaN."""
    for name in {**whole, **seen}:
        if name not in seen or name not in whole:
            return f"{name} is {'missing' if name not in seen else 'new'}"
        one, other = seen[name], whole[name]
        if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
            if one.shape != other.shape:
                return f"{name} is {list(one.shape)}, not {list(other.shape)}"
            if not np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
                apart = np.abs(one.astype(np.float64) - other.astype(np.float64)) if one.dtype.kind in "fiub" else ""
                return f"{name} differs by {np.nanmax(apart) if len(apart) else apart}"
        elif not (type(one) is type(other) and one == other):
            return f"{name} is {one!r:.80}, not {other!r:.80}"
    return ""


def judge(kind: Kind, mutant: Mutant, folder: Path, whole: dict[str, Any]) -> Verdict:
    """Use a mutant that lies in `folder`. A hang or a crash is seen by whoever runs this process."""
    try:
        seen = kind.use(folder, mutant)
    except MoestroError as error:
        message = str(error)
        problem = unclear(message, folder)
        return Verdict(
            "unclear error" if problem else "clear error",
            f"{problem}: {message}" if problem else message,
            innermost(error) if problem else "",
        )
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if isinstance(error, KeyboardInterrupt):
            raise
        return Verdict("exception", f"{type(error).__name__}: {error}"[:600], innermost(error))
    changed = difference(seen, whole)
    if problem := kind.explain(folder, mutant, seen, whole):
        return Verdict("unexplained", f"{changed or 'same as the whole file'}; {problem}")
    return Verdict("explained", changed) if changed else Verdict("same")
