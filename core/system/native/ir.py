"""LLVM instructions as text: a minimal assembler for readable loops over vectors."""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Loop:
    """A counted loop under construction: `index` (i64) and `values`, which are carried between iterations."""

    def __init__(self, index: str, values: list[str]) -> None:
        self.index, self.values = index, values
        self.next: Sequence[str] = ()  # the values in the next iteration; to be set inside the loop


class Code:
    """The instructions of one function, in the order written."""

    def __init__(self, signature: str) -> None:
        """`signature` as in "void @name(ptr %a, i64 %b)"; the function returns nothing."""
        self.name, self.arguments = signature.split("@")[1].split("(")[0], signature.count("%")
        self._lines = [f"define {signature} #0 {{", "entry:"]
        self._block, self._count = "entry", 0
        self.declared: set[str] = set()  # declarations of called functions

    def let(self, instruction: str) -> str:
        """Append an instruction; returns the name of its value."""
        self._count += 1
        self._lines.append(f"  %v{self._count} = {instruction}")
        return f"%v{self._count}"

    def do(self, instruction: str) -> None:
        """Append an instruction without a value."""
        self._lines.append(f"  {instruction}")

    def call(self, kind: str, function: str, *arguments: tuple[str, str], flags: str = "") -> str:
        """Append a call with (type, value)s; returns the name of its result, of type `kind`."""
        given = ", ".join(f"{of} {value}" for of, value in arguments)
        self.declared.add(f"declare {kind} @{function}({', '.join(of for of, _ in arguments)})")
        return self.let(f"call {flags} {kind} @{function}({given})")

    def run(self, function: str, *arguments: tuple[str, str]) -> None:
        """Append a call of an LLVM intrinsic that returns nothing."""
        given = ", ".join(f"{of} {value}" for of, value in arguments)
        self.declared.add(f"declare void @{function}({', '.join(of for of, _ in arguments)})")
        self.do(f"call void @{function}({given})")

    def add(self, one: str | int, other: str | int) -> str:
        """The sum of two i64."""
        if isinstance(one, int) and isinstance(other, int):
            return str(one + other)
        return str(one) if other == 0 else self.let(f"add i64 {one}, {other}")

    def times(self, one: str | int, other: str | int) -> str:
        """The product of two i64."""
        return str(one) if other == 1 else self.let(f"mul i64 {one}, {other}")

    def at(self, pointer: str, index: str | int, size: int = 1) -> str:
        """The address `size` * index bytes after `pointer`."""
        return pointer if index == 0 else self.let(f"getelementptr i8, ptr {pointer}, i64 {self.times(index, size)}")

    def load(self, kind: str, pointer: str, align: int = 1) -> str:
        return self.let(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int = 1) -> None:
        self.do(f"store {kind} {value}, ptr {pointer}, align {align}")

    def pick(self, kind: str, value: str, places: Sequence[int], other: str = "poison") -> str:
        """A vector of the elements at `places` of `value`; places beyond its length select from `other`."""
        mask = ", ".join(f"i32 {place}" for place in places)
        return self.let(f"shufflevector {kind} {value}, {kind} {other}, <{len(places)} x i32> <{mask}>")

    def padded(self, kind: str, value: str, count: int, lanes: int) -> str:
        """<count x kind> in so many lanes; those after them are 0."""
        places = [min(i, count) for i in range(lanes)]
        return value if count == lanes else self.pick(f"<{count} x {kind}>", value, places, "zeroinitializer")

    def joined(self, kind: str, parts: Sequence[tuple[str, int]], lanes: int) -> str:
        """Vectors (value, count) one after the other in so many lanes; those after them are 0."""
        (found, done), *others = [(self.padded(kind, value, count, lanes), count) for value, count in parts]
        for value, count in others:
            places = [i if i < done else lanes + i - done for i in range(lanes)]
            found, done = self.pick(f"<{lanes} x {kind}>", found, places, value), done + count
        return found

    def first(self, value: str) -> str:
        """The number in a vector of one float."""
        return self.let(f"extractelement <1 x float> {value}, i32 0")

    def fma(self, one: str, other: str, added: str, lanes: int = 8) -> str:
        """one * other + added, of vectors of floats, rounded once."""
        kind = f"<{lanes} x float>"
        return self.call(kind, f"llvm.fma.v{lanes}f32", (kind, one), (kind, other), (kind, added))

    def halved(self, kind: str, values: list[str]) -> str:
        """The sum of a power of two of vectors of floats: of the first and the second half of them, until one is
        left."""
        while len(values) > 1:
            pairs = zip(values[: len(values) // 2], values[len(values) // 2 :], strict=True)
            values = [self.let(f"fadd {kind} {one}, {other}") for one, other in pairs]
        return values[0]

    def most(self, one: str, other: str | int) -> str:
        """The larger of two i64."""
        return self.call("i64", "llvm.smax.i64", ("i64", one), ("i64", str(other)))

    def least(self, one: str, other: str | int) -> str:
        """The smaller of two i64."""
        return self.call("i64", "llvm.smin.i64", ("i64", one), ("i64", str(other)))

    def whole(self, count: str, size: int) -> str:
        """The greatest multiple of `size` up to `count`."""
        return self.times(self.let(f"udiv i64 {count}, {size}"), size)

    def stack(self, size: int, align: int = 32) -> str:
        """The address of so many bytes on the stack."""
        return self.let(f"alloca [{size} x i8], align {align}")

    def prefetch(self, pointer: str, level: int = 3) -> None:
        """Have a line of memory in the processor's cache when it is read: 3 = the first one, 2 = the second."""
        self.run("llvm.prefetch.p0", ("ptr", pointer), ("i32", "0"), ("i32", str(level)), ("i32", "1"))

    def broadcast(self, kind: str, value: str, count: int) -> str:
        """A vector filled with one value."""
        one = self.let(f"insertelement <{count} x {kind}> poison, {kind} {value}, i32 0")
        return self.pick(f"<{count} x {kind}>", one, [0] * count)

    @contextmanager
    def loop(
        self, start: str | int, end: str | int, step: int = 1, carried: Sequence[tuple[str, str]] = ()
    ) -> Iterator[Loop]:
        """for index in range(start, end, step), carrying (type, initial value)s; the final ones are available
        afterwards."""
        self._count += 1
        name, before = f"loop{self._count}", self._block
        self.do(f"br label %{name}")
        self.begin(name)
        index = self.let(f"phi i64 [ {start}, %{before} ], [ %{name}.i, %{name}.last ]")
        values = [
            self.let(f"phi {kind} [ {first}, %{before} ], [ %{name}.c{i}, %{name}.last ]")
            for i, (kind, first) in enumerate(carried)
        ]
        more = self.let(f"icmp slt i64 {index}, {end}")
        self.do(f"br i1 {more}, label %{name}.body, label %{name}.end")
        self.begin(f"{name}.body")
        made = Loop(index, values)
        yield made
        self.do(f"br label %{name}.last")
        self.begin(f"{name}.last")
        for i, ((kind, _), value) in enumerate(zip(carried, made.next, strict=True)):
            self.do(f"%{name}.c{i} = bitcast {kind} {value} to {kind}")
        self.do(f"%{name}.i = add i64 {index}, {step}")
        self.do(f"br label %{name}")
        self.begin(f"{name}.end")

    def begin(self, block: str) -> None:
        """Start a basic block of this name."""
        self._block = block
        self._lines.append(f"{block}:")

    def text(self) -> str:
        """The function's LLVM text."""
        return "\n".join([*self._lines, "  ret void", "}", ""])


def vector(kind: str, values: Sequence[int | str]) -> str:
    """A constant vector."""
    return f"<{', '.join(f'{kind} {value}' for value in values)}>"


def splat(kind: str, count: int, value: str | int) -> str:
    """A constant vector filled with one number."""
    return vector(kind, [value] * count)


def fp32(value: float) -> str:
    """A number, rounded to fp32, in LLVM's exact notation."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', rounded))[0]:016X}"
