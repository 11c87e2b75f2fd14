"""`python -m tests.memory.interpret MODULE[:WHICH]...`: what `found(WHICH)` of each of these modules beside this one
gives under Triton's interpreter, as JSON [what each found]. It takes longer to begin than to try a few cases.

A process of its own: the interpreter is chosen when the kernels are imported, and stays chosen.
"""

import inspect
import json
import os
import sys
from importlib import import_module
from typing import Any


def look_once() -> None:
    """Triton's interpreter looks through all members of its language at every call within a kernel, a third of the
    time: have it remember which of them it replaces."""
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def patch(of: Any, builder: object, scope: object) -> None:
        if of not in names:
            names[of] = [name for name, member in inspect.getmembers(of) if is_builtin(member)]
        for name in names[of]:
            if is_builtin(member := getattr(of, name)):  # not replaced by the call around
                interpreter._patch_attr(of, name, member, builder, scope)

    if hasattr(interpreter, "_patch_builtin") and hasattr(interpreter, "_patch_attr"):  # as Triton 3.6 and 3.7 have
        interpreter._patch_builtin = patch


def main(*asked: str) -> None:
    """Print what was found. What is imported here would also be imported by a process that compiles kernels."""
    import torch

    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1"
    look_once()
    parts = [one.partition(":") for one in asked]
    print(json.dumps([import_module(f"tests.memory.{name}").found(which) for name, _, which in parts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
