"""`python -m tests.memory.interpret MODULE[:WHICH]...`: what `found(WHICH)` of each of these modules beside this one
gives under Triton's interpreter, as JSON [what each found]. It takes longer to begin than to try a few cases.

A process of its own: the interpreter is chosen when the kernels are imported, and stays chosen.
"""

import json
import os
import sys
from importlib import import_module


def main(*asked: str) -> None:
    """Print what was found. What is imported here would also be imported by a process that compiles kernels."""
    import torch

    torch.set_num_threads(1)
    assert os.environ.get("TRITON_INTERPRET") == "1"
    parts = [one.partition(":") for one in asked]
    print(json.dumps([import_module(f"tests.memory.{name}").found(which) for name, _, which in parts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
