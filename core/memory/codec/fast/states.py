"""Rounds rows of x to integers of 8 bits, as LLVM instructions: the operand that codes are multiplied by."""

import torch

from core.memory.codec.fast.layout import LANES, LEVELS, Blocks
from core.system.native import numbers
from core.system.native.ir import Code, fp32, splat

NAN = "0x7FF8000000000000"
INFINITE = 0x7F800000


def prepare(name: str, blocks: Blocks, dtype: torch.dtype) -> Code:
    """Generates the function name(x, into): one row of numbers of a type, `blocks.inputs` of them, into
    `blocks.bytes` bytes. A block with a number that is not finite has scale NaN, and so its products."""
    code = Code(f"void @{name}(ptr noalias %x, ptr noalias %into)")
    unit = blocks.unit
    if blocks.count % LANES:
        _clear_last_step(code, blocks)
    with code.loop(0, blocks.count // unit) as each:
        for block in range(unit):
            _block(code, blocks, dtype, each.index, block)
    for block in range(blocks.count % unit):
        _block(code, blocks, dtype, str(blocks.count // unit), block)
    return code


def _clear_last_step(code: Code, blocks: Blocks) -> None:
    """The blocks beyond the last one are 0."""
    last, size = blocks.steps - 1, LANES * blocks.size
    code.store(f"<{size} x i8>", "zeroinitializer", code.at("%into", blocks.numbers + last * size))
    for at in (blocks.scales, blocks.sums, blocks.scaled_sums):
        code.store(f"<{LANES} x i32>", "zeroinitializer", code.at("%into", at + last * LANES * 4), 4)


def _block(code: Code, blocks: Blocks, dtype: torch.dtype, unit: str, block: int) -> None:
    """Round one block of a unit."""
    size, number, per_byte = blocks.size, code.add(code.times(unit, blocks.unit), block), blocks.low.per_byte
    value = numbers.load(code, "%x", code.times(number, size), size, dtype)
    whole, scale, total = _rounded(code, value, size)
    begin, length = code.at(code.at("%into", blocks.numbers), unit, blocks.unit * size), size // per_byte
    for shift in range(per_byte):
        part = code.pick(f"<{size} x i8>", whole, range(shift, size, per_byte))
        code.store(f"<{length} x i8>", part, code.at(begin, blocks.place(block, shift)))
    scaled = code.let(f"fmul float {code.let(f'sitofp i32 {total} to float')}, {scale}")
    for kind, one, at in (
        ("float", scale, blocks.scales),
        ("i32", total, blocks.sums),
        ("float", scaled, blocks.scaled_sums),
    ):
        code.store(kind, one, code.at(code.at("%into", at), number, 4), 4)


def _rounded(code: Code, x: str, size: int) -> tuple[str, str, str]:
    """A block <size x float> as integers <size x i8>, their scale and their sum."""
    floats, ints = f"<{size} x float>", f"<{size} x i32>"
    bits = code.let(f"bitcast {floats} {x} to {ints}")
    bits = code.let(f"and {ints} {bits}, {splat('i32', size, 0x7FFFFFFF)}")
    largest = code.call("i32", f"llvm.vector.reduce.umax.v{size}i32", (ints, bits))
    finite = code.let(f"icmp ult i32 {largest}, {INFINITE}")
    scale = code.let(f"fdiv float {code.let(f'bitcast i32 {largest} to float')}, {fp32(LEVELS)}")
    usable = code.let(f"fcmp ogt float {scale}, 0.0")
    usable = code.let(f"and i1 {usable}, {finite}")
    divisor = code.broadcast("float", code.let(f"select i1 {usable}, float {scale}, float 1.0"), size)
    ratio = code.let(f"fdiv {floats} {x}, {divisor}")
    ratio = code.let(f"select i1 {usable}, {floats} {ratio}, {floats} zeroinitializer")
    near = code.call(floats, f"llvm.rint.v{size}f32", (floats, ratio))
    for function, end in (("minnum", LEVELS), ("maxnum", -LEVELS)):  # scales of few bits, below 2 ** -126
        near = code.call(
            floats, f"llvm.{function}.v{size}f32", (floats, near), (floats, splat("float", size, fp32(end)))
        )
    whole = code.let(f"fptosi {floats} {near} to {ints}")
    total = code.call("i32", f"llvm.vector.reduce.add.v{size}i32", (ints, whole))
    scale = code.let(f"select i1 {finite}, float {scale}, float {NAN}")
    return code.let(f"trunc {ints} {whole} to <{size} x i8>"), scale, total
