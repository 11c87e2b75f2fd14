"""Compiles the kernels of whole experts for given GPUs, and those of `core.runtime.program.gpu.check_layer`, without
having one, and reads the machine code:
`python -m core.runtime.program.gpu.check [75 80 86 ...]` prints what `figures` finds as JSON. Needs triton.

Shapes are those of Qwen3-30B-A3B: 2048 states, 768 hidden, 8 experts a token.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from core.memory.codec import FORMATS, Numbers, PartSpec, make_codec
from core.memory.codec.base import Base
from core.memory.codec.fast.gpu.launch import SINCE, Groups
from core.memory.codec.kernels.build import compiled
from core.memory.codec.matrix import matrix
from core.runtime.program.gate import Gate
from core.runtime.program.gpu import check_layer
from core.runtime.program.gpu.experts import GpuExperts, Mail, Where
from core.runtime.program.gpu.mailbox import mailbox
from core.runtime.program.gpu.recorder import META, Recorder, meta

TARGETS = (75, 80, 86, 89, 90, 100, 120)
HIDDEN, INNER, CHOSEN = 2048, 768, 8
KINDS = ("up", "down", "up of several", "down of several")
TILED = ("up in tiles", "down in tiles")  # of codes, where the compiler has tensor cores multiply them
OTHERS = ("combine", "prepare for up", "prepare for down")
HOSTED = ("publish", "join")  # of what the host takes part in
EXPERTS, WAIT_NS = 128, 10**9
CODED = ("checkpoint", "int8", "int4-g64", "mxfp4", "int3", "q3_k", "iq2_s", "q5_k", "q6_k")  # of each kind of code
Figures = dict[str, int | dict[str, int]]


def kernels(
    name: str, dtype: torch.dtype, capability: int, kinds: Sequence[str] = (*KINDS, *TILED, *OTHERS)
) -> Iterator[tuple[str, Any]]:
    """(kind, compiled kernel) of experts in a format, as they are launched for one token, for several and for many."""
    recorder, experts = _recorded(name, dtype)
    x = meta(dtype, 1, HIDDEN)
    experts.token(Where(tuple(64 * i for i in range(1, CHOSEN + 1))), x, meta(torch.float32, CHOSEN))
    ids, pairs = meta(torch.int64, CHOSEN), meta(torch.int64, 1, CHOSEN)
    groups = Groups(ids, ids, meta(torch.int32, CHOSEN + 1), ids)
    experts.tokens(groups, x, pairs, meta(torch.float32, 1, CHOSEN))
    experts.outputs(groups, x, tiled=True)
    named: dict[str, list[Any]] = {}
    for one in recorder.launched:
        named.setdefault(one[0].__name__, []).append(one)
    up, several_up, several_down = named["_product"][:3]
    each = dict(zip(KINDS, (up, *named["_down"], several_up, several_down), strict=True))
    each |= dict(zip(OTHERS, (*named["_combine"], *named.get("_prepare", [])[:2]), strict=False))
    if has_tiles(name, capability):
        each |= dict(zip(TILED, named["_tiled"], strict=True))
    for kind in kinds:
        if kind in each:  # plain weights need no preparation
            kernel, constants, given = each[kind]
            yield kind, compiled(kernel, constants, given, capability)


def has_tiles(name: str, capability: int) -> bool:
    """Whether a format's products are multiplied in tiles on a GPU."""
    return not FORMATS[name].is_plain and divmod(capability, 10) >= SINCE


def hosted(capability: int) -> Iterator[tuple[str, Any]]:
    """(kind, compiled kernel) of what tells the host of missing experts, and joins what it has computed."""
    recorder, experts = _recorded("int4-g64", torch.bfloat16)
    mail = Mail(mailbox(CHOSEN, HIDDEN), 1 << 40, meta(torch.int64, 3), WAIT_NS)
    ids, x = meta(torch.int64, CHOSEN), meta(torch.float32, 1, HIDDEN)
    experts.with_host(mail, meta(torch.int64, EXPERTS), ids, EXPERTS, x, meta(torch.float32, CHOSEN))
    for kernel, constants, given in recorder.launched:
        if (kind := kernel.__name__[1:]) in HOSTED:
            yield kind, compiled(kernel, constants, given, capability)


def _recorded(name: str, dtype: torch.dtype) -> tuple[Recorder, GpuExperts]:
    """Experts in a format, and what is launched for them."""
    specs = {
        "gate_up_proj": PartSpec((2 * INNER, HIDDEN), dtype),
        "down_proj": PartSpec((HIDDEN, INNER), dtype),
    }
    stored = Numbers(dtype, torch.float16, torch.bfloat16)
    codec = make_codec(name, specs=specs, dtype=dtype, device=META, stored=stored)
    assert isinstance(codec, Base)
    recorder = Recorder()
    return recorder, GpuExperts(matrix(codec, "gate_up_proj"), matrix(codec, "down_proj"), Gate(INNER), recorder)


def figures(made: Any) -> Figures:
    """Of a compiled kernel: registers, bytes of stack, instructions on the stack's memory, instructions and barriers of
    the longest innermost loop of what all programs do (0 = none), how often each width of load is in that loop, or in
    all, and instructions that have tensor cores multiply 8-bit integers."""
    instructions, labels = disassembled(made.asm["cubin"])
    by_all = before_the_last(instructions)
    loop = longest_loop(by_all, labels)
    loads = Counter(width_of(one) for one in loop or by_all if one.startswith("LDG"))
    used = re.search(r"REG:(\d+) STACK:(\d+)", tool("cuobjdump", "--dump-resource-usage", image=made.asm["cubin"]))
    assert used is not None
    return {
        "registers": int(used[1]),
        "stack": int(used[2]),
        "spills": sum(one.startswith(("LDL", "STL")) for one in instructions),
        "instructions": len(instructions),
        "loop": len(loop),
        "loop_barriers": sum(one.startswith("BAR") for one in loop),
        "loop_loads": {str(bits): count for bits, count in sorted(loads.items())},
        "tensor_cores": sum(bool(re.match(r"IMMA|IGMMA|UTCIMMA", one)) for one in instructions),
    }


def tool(name: str, *options: str, image: bytes) -> str:
    """What one of the programs that Triton brings along prints of machine code."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(image)
        return subprocess.run([program, *options, path], capture_output=True, text=True, check=True).stdout


def disassembled(image: bytes) -> tuple[list[str], dict[str, int]]:
    """Instructions without their predicates, and where labels are among them."""
    instructions, labels = list[str](), dict[str, int]()
    for line in tool("nvdisasm", "-c", image=image).splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif found := re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", line):
            instructions.append(found[1])
    return instructions, labels


def before_the_last(instructions: Sequence[str]) -> Sequence[str]:
    """Those before the count of programs that are through, behind which the last one goes on."""
    return instructions[: next((at for at, one in enumerate(instructions) if one.startswith("ATOM")), None)]


def longest_loop(instructions: Sequence[str], labels: dict[str, int]) -> list[str]:
    """Of the loops that have no other inside."""
    ends = list[tuple[int, int]]()
    for at, one in enumerate(instructions):
        target = re.match(r"(?:BRA|CALL)\b.*?(\.L_x_\d+)", one)
        if target and labels.get(target[1], at) < at:
            ends.append((labels[target[1]], at + 1))
    inner = [a for a in ends if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in ends)]
    first, last = max(inner, key=lambda one: one[1] - one[0], default=(0, 0))
    return list(instructions[first:last])


def width_of(load: str) -> int:
    """Bits that an instruction LDG loads."""
    found = re.search(r"\.(?:U|S)?(8|16|64|128)\b", load.split()[0])
    return int(found[1]) if found else 32


def every(capabilities: Sequence[int], formats: Sequence[str] = CODED) -> dict[str, dict[str, Figures]]:
    """{"sm_80": {"int4-g64 up": figures}} of the experts' products, and of all else that a layer computes."""
    found: dict[str, dict[str, Figures]] = {}
    for capability in capabilities:
        each = found[f"sm_{capability}"] = {}
        for name in formats:
            for kind, made in kernels(name, torch.bfloat16, capability, (*KINDS, *TILED)):
                each[f"{name} {kind}"] = figures(made)
        each |= {name: figures(made) for name, made in check_layer.kernels(capability)}
        each |= {name: figures(made) for name, made in hosted(capability)}
    return found


if __name__ == "__main__":
    import triton

    print(
        json.dumps(
            {"triton": triton.__version__, "kernels": every([int(a) for a in sys.argv[1:]] or TARGETS)}, indent=1
        )
    )
