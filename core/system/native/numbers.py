"""Converts every number type of slots and states to fp32 and back. Conversions are instructions, never calls."""

import torch

from core.system.native.ir import Code, fp32, splat

KINDS = {
    torch.float32: "float",
    torch.float16: "half",
    torch.bfloat16: "i16",
    torch.uint8: "i8",
    torch.int8: "i8",
    torch.float8_e4m3fn: "i8",
}


def load(code: Code, pointer: str, first: str | int, count: int, dtype: torch.dtype) -> str:
    """`count` numbers from index `first` on as <count x float>; a uint8 is an exponent: 2 ** (e - 127), 255 = NaN;
    an int8 is an integer."""
    kind, size = KINDS[dtype], dtype.itemsize
    return floats(code, code.load(f"<{count} x {kind}>", code.at(pointer, first, size), size), count, dtype)


def floats(code: Code, raw: str, count: int, dtype: torch.dtype) -> str:
    """Loaded numbers as <count x float>."""
    kind, ints = KINDS[dtype], f"<{count} x i32>"
    if dtype == torch.float32:
        return raw
    if dtype == torch.float16:
        return code.let(f"fpext <{count} x half> {raw} to <{count} x float>")
    if dtype == torch.float8_e4m3fn:
        return _four_and_three(code, raw, count)
    if dtype == torch.int8:
        whole = code.let(f"sext <{count} x i8> {raw} to {ints}")
        return code.let(f"sitofp {ints} {whole} to <{count} x float>")
    wide = code.let(f"zext <{count} x {kind}> {raw} to {ints}")
    shifted = code.let(f"shl {ints} {wide}, {splat('i32', count, 16 if kind == 'i16' else 23)}")
    if kind == "i8":  # subnormal, and NaN
        ends = [code.let(f"icmp eq {ints} {wide}, {splat('i32', count, end)}") for end in (0, 255)]
        odd = code.let(f"or <{count} x i1> {ends[0]}, {ends[1]}")
        more = code.let(f"select <{count} x i1> {odd}, {ints} {splat('i32', count, 1 << 22)}, {ints} zeroinitializer")
        shifted = code.let(f"or {ints} {shifted}, {more}")
    return code.let(f"bitcast {ints} {shifted} to <{count} x float>")


def _four_and_three(code: Code, raw: str, count: int) -> str:
    """Numbers of 4 bits of exponent and 3 of mantissa: as fp16, whose exponents begin 8 lower; all ones are NaN."""
    shorts, floats_ = f"<{count} x i16>", f"<{count} x float>"
    wide = code.let(f"sext <{count} x i8> {raw} to {shorts}")
    low = code.let(f"and {shorts} {wide}, {splat('i16', count, 0x7F)}")
    odd = code.let(f"icmp eq {shorts} {low}, {splat('i16', count, 0x7F)}")
    more = code.let(f"select <{count} x i1> {odd}, {shorts} {splat('i16', count, 0x7C00)}, {shorts} zeroinitializer")
    moved = code.let(f"shl {shorts} {wide}, {splat('i16', count, 7)}")
    moved = code.let(f"and {shorts} {moved}, {splat('i16', count, -0x4001)}")
    half = code.let(f"bitcast {shorts} {code.let(f'or {shorts} {moved}, {more}')} to <{count} x half>")
    value = code.let(f"fpext <{count} x half> {half} to {floats_}")
    return code.let(f"fmul {floats_} {value}, {splat('float', count, fp32(256.0))}")


def rounded(code: Code, value: str, count: int, dtype: torch.dtype) -> tuple[str, str]:
    """<count x float> in another type, rounded to nearest, ties to even: (LLVM's type, value)."""
    if dtype == torch.float32:
        return f"<{count} x float>", value
    if dtype == torch.float16:
        return f"<{count} x half>", code.let(f"fptrunc <{count} x float> {value} to <{count} x half>")
    ints = f"<{count} x i32>"
    bits = code.let(f"bitcast <{count} x float> {value} to {ints}")
    above = code.let(f"lshr {ints} {bits}, {splat('i32', count, 16)}")
    odd = code.let(f"and {ints} {above}, {splat('i32', count, 1)}")
    half = code.let(f"add {ints} {odd}, {splat('i32', count, 0x7FFF)}")
    up = code.let(f"add {ints} {bits}, {half}")
    number = code.let(f"fcmp ord <{count} x float> {value}, zeroinitializer")
    up = code.let(f"select <{count} x i1> {number}, {ints} {up}, {ints} {splat('i32', count, 0x7FC00000)}")
    short = code.let(f"lshr {ints} {up}, {splat('i32', count, 16)}")
    return f"<{count} x i16>", code.let(f"trunc {ints} {short} to <{count} x i16>")


def store(code: Code, value: str, pointer: str, at: str | int, count: int, dtype: torch.dtype) -> None:
    """Round <count x float> to another type and store it from index `at` on."""
    kind, short = rounded(code, value, count, dtype)
    code.store(kind, short, code.at(pointer, at, dtype.itemsize), dtype.itemsize)


def store_one(code: Code, value: str, pointer: str, at: str | int, dtype: torch.dtype) -> None:
    """The same of a float."""
    store(code, code.let(f"insertelement <1 x float> poison, float {value}, i32 0"), pointer, at, 1, dtype)


def again(code: Code, value: str, count: int, dtype: torch.dtype) -> str:
    """<count x float> after rounding to another type and back."""
    return floats(code, rounded(code, value, count, dtype)[1], count, dtype)
