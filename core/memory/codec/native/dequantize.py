"""Dequantises rows of codes, as LLVM instructions: for prompts, whose many states torch multiplies."""

import torch

from core.memory.codec.matrix import Matrix, Part
from core.memory.codec.native import codes
from core.memory.codec.native.states import BLOCK, CodeRun
from core.system.native import numbers
from core.system.native.ir import Code, fp32, splat, vector

LOOKED_UP = "llvm.x86.avx512.permvar.hi.512"  # 32 numbers out of a table of as many


def dequantize(name: str, matrix: Matrix, dtype: torch.dtype, width: int) -> Code:
    """Generates the function name(nothing, slot, out, from, to): rows from..to - 1 of the matrix in a slot, dequantised
    into out [outputs, inputs]. `width` = bytes of a vector."""
    code = Code(f"void @{name}(ptr %nothing, ptr noalias %slot, ptr noalias %out, i64 %from, i64 %to)")
    meaning = codes.meaning(matrix)
    whole = not matrix.group % BLOCK
    if width == 64 and meaning.planes[0].bits == 4 and dtype.itemsize == 2 and whole:
        _by_table(code, matrix, meaning, dtype)
    else:
        _one_by_one(code, matrix, meaning, dtype)
    return code


def _by_table(code: Code, matrix: Matrix, meaning: codes.Meaning, dtype: torch.dtype) -> None:
    """Of codes of 4 bits there are 16: a group's numbers are computed once for each, and looked up."""
    group, (plane,) = matrix.group or matrix.inputs, meaning.planes
    blocks, lanes = group // BLOCK, f"<{BLOCK} x i16>"
    with code.loop("%from", "%to") as row, code.loop(0, matrix.inputs // group) as each:
        at = code.add(code.times(row.index, matrix.inputs // group), each.index)
        table = code.pick("<16 x i16>", _table(code, matrix, meaning, dtype, at), [*range(16)] * 2)
        first = code.times(at, blocks)
        with code.loop(0, blocks, min(4, blocks & -blocks)) as some:
            for i in range(min(4, blocks & -blocks)):  # as many as divide the group, without a loop
                block = code.add(code.add(first, some.index), i)
                raw = code.load("<16 x i8>", code.at(code.at("%slot", plane.at), block, BLOCK // 2))
                pair = code.let(f"zext <16 x i8> {raw} to <16 x i32>")
                moved = code.let(f"shl <16 x i32> {pair}, {splat('i32', 16, 12)}")
                both = code.let(f"or <16 x i32> {pair}, {moved}")
                index = code.let(f"and <16 x i32> {both}, {splat('i32', 16, 0x000F000F)}")
                index = code.let(f"bitcast <16 x i32> {index} to {lanes}")
                value = code.call(lanes, LOOKED_UP, (lanes, table), (lanes, index))
                code.store(lanes, value, code.at("%out", block, BLOCK * 2), 2)


def _table(code: Code, matrix: Matrix, meaning: codes.Meaning, dtype: torch.dtype, group: str) -> str:
    """The numbers that the 16 codes stand for in a group, as <16 x i16> bits."""
    floats = "<16 x float>"
    entries = meaning.entries or [entry - meaning.planes[0].offset for entry in range(16)]
    value = vector("float", [fp32(float(entry)) for entry in entries])
    if meaning.factor != 1.0:
        value = code.let(f"fmul {floats} {value}, {splat('float', 16, fp32(meaning.factor))}")
    assert matrix.scale is not None
    value = code.let(f"fmul {floats} {value}, {_all(code, group, matrix.scale, 16)}")
    if matrix.zero is not None:
        value = code.let(f"fadd {floats} {value}, {_all(code, group, matrix.zero, 16)}")
    kind, made = numbers.rounded(code, value, 16, dtype)
    return code.let(f"bitcast {kind} {made} to <16 x i16>")


def _one_by_one(code: Code, matrix: Matrix, meaning: codes.Meaning, dtype: torch.dtype) -> None:
    blocks, floats = matrix.inputs // BLOCK, f"<{BLOCK} x float>"
    assert matrix.scale is not None
    with code.loop("%from", "%to") as row, code.loop(0, blocks) as block:
        at = code.add(code.times(row.index, blocks), block.index)
        value = ""
        for plane in meaning.planes:
            bytes_ = BLOCK * plane.bits // 8
            run = CodeRun(0, 1, BLOCK, bytes_, max(bytes_ // 2, 8))
            found = codes.read(code, meaning.entries, plane, run, code.at(code.at("%slot", plane.at), at, bytes_))
            if plane.offset:
                found = [
                    code.let(f"sub <{run.words} x i16> {one}, {splat('i16', run.words, plane.offset)}") for one in found
                ]
            whole = _ordered(code, found, run.words)
            one = code.let(f"sitofp <{BLOCK} x i16> {whole} to {floats}")
            if plane.weight != 1:
                one = code.let(f"fmul {floats} {one}, {splat('float', BLOCK, fp32(plane.weight))}")
            value = code.let(f"fadd {floats} {value}, {one}") if value else one
        if meaning.factor != 1.0:
            value = code.let(f"fmul {floats} {value}, {splat('float', BLOCK, fp32(meaning.factor))}")
        if 0 < matrix.group < BLOCK:
            scale = _some(code, matrix, matrix.scale, at)
        else:
            group = code.let(f"udiv i64 {at}, {matrix.group // BLOCK if matrix.group else blocks}")
            scale = _all(code, group, matrix.scale)
        if matrix.row is not None:
            scale = code.let(f"fmul {floats} {scale}, {_all(code, row.index, matrix.row)}")
        value = code.let(f"fmul {floats} {value}, {scale}")
        if matrix.zero is not None:
            value = code.let(f"fadd {floats} {value}, {_all(code, group, matrix.zero)}")
        numbers.store(code, value, code.at("%out", at, BLOCK * dtype.itemsize), 0, BLOCK, dtype)


def _all(code: Code, at: str, part: Part, count: int = BLOCK) -> str:
    return code.broadcast("float", codes.one(code, "%slot", part, at), count)


def _some(code: Code, matrix: Matrix, part: Part, block: str) -> str:
    """Those of a block that has several groups."""
    groups = BLOCK // matrix.group
    found = numbers.load(code, code.at("%slot", part.at), code.times(block, groups), groups, part.dtype)
    return code.pick(f"<{groups} x float>", found, [i // matrix.group for i in range(BLOCK)])


def _ordered(code: Code, found: list[str], words: int) -> str:
    """Codes grouped by position in words, as one vector in the order of the inputs."""
    while len(found) > 1:
        half = len(found) // 2
        wide = words * 2
        found = [
            code.pick(f"<{words} x i16>", first, [i // 2 + i % 2 * words for i in range(wide)], second)
            for first, second in zip(found[:half], found[half:], strict=True)
        ]
        words = wide
    return found[0] if words == BLOCK else code.pick(f"<{words} x i16>", found[0], range(BLOCK))
