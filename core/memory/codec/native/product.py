"""Rows of codes times states, as LLVM instructions: bytes are read once and multiplied without repacking."""

from collections.abc import Sequence

import torch

from core.memory.codec.matrix import Matrix
from core.memory.codec.native import codes
from core.memory.codec.native.states import CodeRun, Plane, StateLayout
from core.system.native import numbers
from core.system.native.ir import Code, fp32, splat

AHEAD = 4096  # bytes prefetched ahead; rows follow one another, which the CPU's own prefetcher does not detect
PRODUCT = {32: "llvm.x86.avx512.pmaddw.d.512", 16: "llvm.x86.avx2.pmadd.wd", 8: "llvm.x86.sse2.pmadd.wd"}

Totals = dict[tuple[int, int], str]  # by row and state: one fp32 per lane


class Product:
    """Generates the function name(states, slot, out, from, to): prepared states, consecutive in memory, times rows
    from..to - 1 (a multiple of `rows`) of the matrix in a slot, into out [states, outputs]."""

    def __init__(
        self, name: str, matrix: Matrix, layout: StateLayout, dtype: torch.dtype, rows: int, states: int
    ) -> None:
        self.code = Code(f"void @{name}(ptr noalias %states, ptr noalias %slot, ptr noalias %out, i64 %from, i64 %to)")
        self._matrix, self._layout, self._dtype, self._states = matrix, layout, dtype, states
        self._meaning, self._lanes = codes.meaning(matrix), layout.width // 4
        self._pairs = [(r, t) for r in range(rows) for t in range(states)]
        with self.code.loop("%from", "%to", rows) as block:
            self._rows = [self.code.add(block.index, r) for r in range(rows)]
            totals = dict.fromkeys(self._pairs, "zeroinitializer")
            for p, run in layout.places:
                self._run(p, run, totals)
            if matrix.zero is not None:
                self._zeros(totals)
            for (r, t), total in totals.items():
                self._write(self._rows[r], t, total)

    def _run(self, p: int, run: CodeRun, totals: Totals) -> None:
        """Add the product of a run of one plane's codes and the states."""
        kind, whole = f"<{run.lanes} x float>", run.lanes == self._lanes
        first = [(kind, total if whole else "zeroinitializer") for total in totals.values()]
        with self.code.loop(0, run.turns, 1, first) as each:
            found = dict(zip(self._pairs, each.values, strict=True))
            self._vector(p, run, each.index, found)
            each.next = list(found.values())
        for pair, value in zip(self._pairs, each.values, strict=True):
            totals[pair] = value if whole else self._wider(totals[pair], value, run.lanes)

    def _vector(self, p: int, run: CodeRun, index: str, totals: Totals) -> None:
        code, plane, lanes = self.code, self._layout.planes[p], run.lanes
        words, floats, ints = f"<{run.words} x i16>", f"<{lanes} x float>", f"<{lanes} x i32>"
        seen = [self._seen(p, run, index, t) for t in range(self._states)]
        stride = self._matrix.inputs * plane.bits // 8
        begin = code.at("%slot", plane.at + run.start * plane.bits // 8)
        rows = [code.at(begin, row, stride) for row in self._rows]
        ahead = code.at(rows[0], index, run.bytes * len(rows))
        for r, row in enumerate(rows):
            code.prefetch(code.at(ahead, AHEAD + r * run.bytes))
            found = codes.read(code, self._meaning.entries, plane, run, code.at(row, index, run.bytes))
            scale = self._scales(self._rows[r], run, index, plane) if self._matrix.group else ""
            for t, (stored, step, total) in enumerate(seen):
                for one, number in zip(found, stored, strict=True):
                    product = code.call(ints, PRODUCT[run.words], (words, one), (words, number))
                    total = code.let(f"add {ints} {total}, {product}")
                value = code.let(f"sitofp {ints} {total} to {floats}")
                by = code.let(f"fmul {floats} {step}, {scale}") if scale else step
                totals[r, t] = code.fma(value, by, totals[r, t], lanes)

    def _seen(self, p: int, run: CodeRun, index: str, state: int) -> tuple[Sequence[str], str, str]:
        """A state's numbers for a vector of codes, the factor of their sums and the sums' initial value."""
        code, plane, place = self.code, self._layout.planes[p], self._layout.places[p, run]
        own = code.at("%states", state * self._layout.bytes)
        begin = code.at(code.at(own, place.numbers), index, run.words * plane.per_word * 2)
        stored = [
            code.load(f"<{run.words} x i16>", code.at(begin, s * run.words * 2), 2) for s in range(plane.per_word)
        ]
        step = code.load(f"<{run.lanes} x float>", code.at(code.at(own, place.steps), index, run.lanes * 4), 4)
        if not plane.offset:
            return stored, step, "zeroinitializer"
        offset = code.at(code.at(own, place.offsets), index, run.lanes * 4)
        return stored, step, code.load(f"<{run.lanes} x i32>", offset, 4)

    def _scales(self, row: str, run: CodeRun, index: str, plane: Plane) -> str:
        """The scale of each lane of a vector, times the weight of its plane's codes."""
        code, group = self.code, self._matrix.group
        first = code.add(code.times(index, run.codes), run.start)
        at = code.add(code.times(row, self._matrix.inputs // group), code.let(f"udiv i64 {first}, {group}"))
        count = max(1, run.codes // group)
        assert self._matrix.scale is not None
        values = numbers.load(code, code.at("%slot", self._matrix.scale.at), at, count, self._matrix.scale.dtype)
        if plane.weight != 1:
            values = code.let(f"fmul <{count} x float> {values}, {splat('float', count, fp32(plane.weight))}")
        real = run.bytes // 4  # lanes that codes were read for
        return code.pick(f"<{count} x float>", values, [min(i, real - 1) * count // real for i in range(run.lanes)])

    def _zeros(self, totals: Totals) -> None:
        """Add each group's zero times the sum of its states."""
        code, matrix, start, width = self.code, self._matrix, 0, self._lanes
        assert matrix.zero is not None
        groups = matrix.inputs // matrix.group
        while start < groups:
            while start + width > groups:
                width //= 2
            kind = f"<{width} x float>"
            sums = [
                code.load(kind, code.at("%states", t * self._layout.bytes + self._layout.sums + start * 4), 4)
                for t in range(self._states)
            ]
            for r, row in enumerate(self._rows):
                at = code.add(code.times(row, groups), start)
                zeros = numbers.load(code, code.at("%slot", matrix.zero.at), at, width, matrix.zero.dtype)
                for t, total in enumerate(sums):
                    product = code.let(f"fmul {kind} {zeros}, {total}")
                    totals[r, t] = self._wider(totals[r, t], product, width)
            start += width

    def _wider(self, total: str, value: str, count: int) -> str:
        """total + value, where value may have fewer lanes."""
        value = self.code.padded("float", value, count, self._lanes)
        return self.code.let(f"fadd <{self._lanes} x float> {total}, {value}")

    def _write(self, row: str, state: int, total: str) -> None:
        """Sum over all lanes, scale, and store to `out`."""
        code, matrix = self.code, self._matrix
        y = code.call(
            "float",
            f"llvm.vector.reduce.fadd.v{self._lanes}f32",
            ("float", "0.0"),
            (f"<{self._lanes} x float>", total),
            flags="reassoc",
        )
        if self._meaning.factor != 1.0:
            y = code.let(f"fmul float {y}, {fp32(self._meaning.factor)}")
        if by_row := matrix.row_scale:
            y = code.let(f"fmul float {y}, {codes.one(code, '%slot', by_row, row)}")
        numbers.store_one(code, y, "%out", code.add(row, state * matrix.outputs), self._dtype)
