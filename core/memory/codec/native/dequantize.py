"""Dequantises rows of codes, as LLVM instructions: for prompts, whose many states torch multiplies."""

from __future__ import annotations

import torch

from core.memory.codec.matrix import Matrix, Part
from core.memory.codec.native import codes
from core.memory.codec.native.states import BLOCK, CodeRun
from core.native import numbers
from core.native.ir import Code, fp32, splat


def dequantize(name: str, matrix: Matrix, dtype: torch.dtype) -> Code:
    """Generates the function name(nothing, slot, out, from, to): rows from..to - 1 of the matrix in a slot, dequantised
    into out [outputs, inputs]."""
    code = Code(f"void @{name}(ptr %nothing, ptr noalias %slot, ptr noalias %out, i64 %from, i64 %to)")
    meaning = codes.meaning(matrix)
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
        group = code.let(f"udiv i64 {at}, {matrix.group // BLOCK if matrix.group else blocks}")
        value = code.let(f"fmul {floats} {value}, {_all(code, group, matrix.scale)}")
        if matrix.zero is not None:
            value = code.let(f"fadd {floats} {value}, {_all(code, group, matrix.zero)}")
        kind, made = numbers.rounded(code, value, BLOCK, dtype)
        code.store(kind, made, code.at("%out", at, BLOCK * dtype.itemsize), dtype.itemsize)
    return code


def _all(code: Code, at: str, part: Part) -> str:
    return code.broadcast("float", codes.one(code, "%slot", part, at), BLOCK)


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
