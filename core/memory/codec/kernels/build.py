"""Compiles kernels in this process: by LLVM and the ptxas that Triton brings along, without a C compiler and a GPU.

Triton's JIT compiles a kernel for the arguments of a launch: their types, and which of them are multiples of 16, as
wide loads need. The compiler gets the same facts here, so that both make the same machine code. Only that an
argument is 1 is left out.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

Kind = tuple[str, bool]  # Triton's name of a type; whether the value is a multiple of 16
Kinds = tuple["Kind | tuple[Kind, ...] | None", ...]  # of a launch's arguments, in order

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CODES = {"i32": "i", "i64": "q"}  # as struct packs them; pointers are "Q"
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z](\d+)[^,\[]*(\[)?")  # bits of one in PTX; of an array?
UNSUPPORTED = ("launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")  # 0 here


class Binary(NamedTuple):
    """Machine code of a kernel, and what its launch needs."""

    name: str
    image: bytes
    parameters: str  # its arguments in order, as `struct` packs them
    scratch: int  # pointers behind them to memory of Triton's own, of which the kernel needs none
    threads: int  # of a program
    shared: int  # bytes


def kinds_of(arguments: Sequence[object]) -> Kinds:
    """Of the arguments of a launch: tensors, integers, tuples of addresses, and None where a kernel takes none."""
    return tuple(_kind(one) for one in arguments)


def _kind(one: object) -> Kind | tuple[Kind, ...] | None:
    if one is None:
        return None
    if isinstance(one, tuple):
        return tuple(("i64", address % 16 == 0) for address in one)
    if isinstance(one, torch.Tensor):
        return POINTERS[one.dtype], one.data_ptr() % 16 == 0
    assert isinstance(one, int)
    return "i32" if -(1 << 31) <= one < 1 << 31 else "i64", one % 16 == 0


def compiled(kernel: Any, constants: Mapping[str, Any], kinds: Kinds, capability: int) -> Any:
    """Triton's compiled kernel for NVIDIA's compute capability 10 * major + minor. `constants` = the kernel's, and
    options of the compiler. Raises what the compiler raises."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    fixed = {name: value for name, value in constants.items() if name in names}
    free = [name for name in names if name not in fixed]
    signature: dict[str, Any] = dict.fromkeys(names, "constexpr")
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for name, kind in zip(free, kinds, strict=True):
        at = names.index(name)
        if kind is None:
            fixed[name] = None
            continue
        several = isinstance(kind[0], tuple)
        each: Any = kind if several else (kind,)
        signature[name] = tuple(one for one, _ in each) if several else each[0][0]
        attributes |= {
            (at, i) if several else (at,): [["tt.divisibility", 16]] for i, (_, whole) in enumerate(each) if whole
        }
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()}, attributes)
    options = {name: value for name, value in constants.items() if name not in names}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def build(kernel: Any, constants: Mapping[str, Any], kinds: Kinds, capability: int) -> Binary:
    """As `compiled`, with what a launch needs. Raises RuntimeError where it needs what is not known here."""
    return binary_of(compiled(kernel, constants, kinds, capability), kinds)


def binary_of(made: Any, kinds: Kinds) -> Binary:
    """Of what `compiled` gave for these kinds. Raises RuntimeError."""
    needed = made.metadata
    if other := [name for name in UNSUPPORTED if getattr(needed, name, 0)] + ["num_ctas"] * (needed.num_ctas != 1):
        raise RuntimeError(f"the kernel {needed.name} cannot be launched without Triton: it needs {', '.join(other)}")
    flat = [one for kind in kinds if kind for one in (kind if isinstance(kind[0], tuple) else (kind,))]
    codes = "".join(CODES.get(str(one), "Q") for one, _ in flat)
    wanted, found = [32 if code == "i" else 64 for code in codes], parameter_bits(made.asm["ptx"], needed.name)
    scratch = found[len(wanted) :]
    if found[: len(wanted)] != wanted or scratch != [64] * sum(name in needed._fields for name in UNSUPPORTED[2:]):
        raise RuntimeError(f"the kernel {needed.name} takes parameters of {found} bits, and {wanted} are known")
    return Binary(needed.name, made.asm["cubin"], codes, len(scratch), needed.num_warps * 32, needed.shared)


def parameter_bits(ptx: str, name: str) -> list[int]:
    """Of a kernel's parameters, in order; 0 for an array."""
    entry = re.search(rf"\.entry\s+{re.escape(name)}\s*\(([^)]*)\)", ptx)
    return [0 if array else int(bits) for bits, array in PARAMETER.findall(entry[1])] if entry else []
