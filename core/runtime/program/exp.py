"""exp in fp32, and what is made of it, as one sequence of instructions: the same bits on every CPU.

exp(x) = 2**n * exp(r), where n is the integer nearest to x / ln 2 and |r| <= ln 2 / 2: Taylor's polynomial of degree 7
is off by at most 8e-9 there. Within 1 unit in the last place of the true value wherever that is a normal number.
"""

import math
import struct

from core.runtime.program.vectors import FLOATS, LANES, ZERO, Kernel, number
from core.system.native.ir import splat

LEAST, MOST = -104.0, 89.0  # exp of what is below is 0, and of what is above infinite, in fp32
SHIFT = 1.5 * 2**23  # a number added to this is rounded to an integer, which is in the low bits of the sum
LN2 = struct.unpack("<f", struct.pack("<f", math.log(2)))[0]
LN2_REST = math.log(2) - LN2
DEGREE = 7
ARTANH = 8  # terms after the first: what is left out is below 4e-10 of the sum, for |s| <= 1 / 3


def exp(code: Kernel, x: str, lanes: int = LANES) -> str:
    """exp of <lanes x float>. NaN stays NaN."""
    kind, ints, bools = f"<{lanes} x float>", f"<{lanes} x i32>", f"<{lanes} x i1>"
    for limit, beyond in ((LEAST, "olt"), (MOST, "ogt")):
        out = code.let(f"fcmp {beyond} {kind} {x}, {number(limit, lanes)}")
        x = code.let(f"select {bools} {out}, {kind} {number(limit, lanes)}, {kind} {x}")
    shifted = code.fma(x, number(1 / math.log(2), lanes), number(SHIFT, lanes), lanes)
    n = code.op("fsub", shifted, number(SHIFT, lanes), lanes)
    r = code.fma(n, number(-LN2, lanes), x, lanes)
    r = code.fma(n, number(-LN2_REST, lanes), r, lanes)
    value = number(1 / math.factorial(DEGREE), lanes)
    for power in reversed(range(DEGREE)):
        value = code.fma(value, r, number(1 / math.factorial(power), lanes), lanes)
    # 2**n may be out of range where the result is not: two factors, of which only the second one rounds
    bits = code.let(f"bitcast {kind} {shifted} to {ints}")
    whole = code.let(f"sub {ints} {bits}, {splat('i32', lanes, struct.unpack('<i', struct.pack('<f', SHIFT))[0])}")
    half = code.let(f"ashr {ints} {whole}, {splat('i32', lanes, 1)}")
    for power_of_2 in (half, code.let(f"sub {ints} {whole}, {half}")):
        biased = code.let(f"add {ints} {power_of_2}, {splat('i32', lanes, 127)}")
        factor = code.let(f"shl {ints} {biased}, {splat('i32', lanes, 23)}")
        value = code.op("fmul", value, code.let(f"bitcast {ints} {factor} to {kind}"), lanes)
    return value


def one_plus_exp(code: Kernel, x: str) -> str:
    """1 + exp(x): what a sigmoid of -x divides by."""
    return code.op("fadd", exp(code, x), number(1))


def sigmoid(code: Kernel, x: str) -> str:
    """1 / (1 + exp(-x))."""
    return code.op("fdiv", number(1), one_plus_exp(code, code.let(f"fneg {FLOATS} {x}")))


def tanh(code: Kernel, x: str) -> str:
    """1 - 2 / (1 + exp(2x)); off by at most 2e-7, absolutely."""
    part = code.op("fdiv", number(2), one_plus_exp(code, code.op("fadd", x, x)))
    return code.op("fsub", number(1), part)


def softplus(code: Kernel, x: str) -> str:
    """log(1 + exp(x)) = max(x, 0) + 2 * artanh(s), where s = t / (2 + t) and t = exp(-|x|)."""
    size = code.call(FLOATS, f"llvm.fabs.v{LANES}f32", (FLOATS, x))
    t = exp(code, code.let(f"fneg {FLOATS} {size}"))
    s = code.op("fdiv", t, code.op("fadd", t, number(2)))
    square = code.op("fmul", s, s)
    value = number(1 / (2 * ARTANH + 1))
    for power in reversed(range(ARTANH)):
        value = code.fma(value, square, number(1 / (2 * power + 1)))
    return code.fma(code.op("fadd", s, s), value, code.larger(x, ZERO))
