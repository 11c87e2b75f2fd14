"""The kernel that rotates queries and keys of some tokens in one launch. Importing this module needs triton."""

import triton
import triton.language as tl


def _rotate(
    q: tl.tensor,
    k: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_out: tl.tensor,
    k_out: tl.tensor,
    queries: tl.tensor,
    cos_token: tl.tensor,
    sin_token: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    q_token_out: tl.tensor,
    q_head_out: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    k_token_out: tl.tensor,
    k_head_out: tl.tensor,
    Q_NUMBERS: tl.constexpr,
    K_NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GIVEN: tl.constexpr,
    PUT: tl.constexpr,
    TABLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    COUPLES: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """Program (h, t): head h of the `queries` heads of queries, or of the keys after them, of token t. Names in
    capitals are of core.hf.rotary_form; COUPLES and REST are powers of two that cover the couples and what is passed
    on."""
    head, token = tl.program_id(0), tl.program_id(1)
    cos += token * cos_token
    sin += token * sin_token
    if head < queries:
        x, out = q + token * q_token + head * q_head, q_out + token * q_token_out + head * q_head_out
        turn(x, out, cos, sin, Q_NUMBERS, WIDTH, GIVEN, PUT, TABLE, ROUNDS, COUPLES, REST)
    else:
        head -= queries
        x, out = k + token * k_token + head * k_head, k_out + token * k_token_out + head * k_head_out
        turn(x, out, cos, sin, K_NUMBERS, WIDTH, GIVEN, PUT, TABLE, ROUNDS, COUPLES, REST)


def _turn(
    x: tl.tensor,
    out: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    NUMBERS: tl.constexpr,
    WIDTH: tl.constexpr,
    GIVEN: tl.constexpr,
    PUT: tl.constexpr,
    TABLE: tl.constexpr,
    ROUNDS: tl.constexpr,
    COUPLES: tl.constexpr,
    REST: tl.constexpr,
) -> None:
    """One head of NUMBERS."""
    j = tl.arange(0, COUPLES)
    known, half = j < WIDTH // 2, WIDTH // 2
    a, b = load(x, j, known, half, GIVEN)
    c1, c2 = load(cos, j, known, half, TABLE)
    s1, s2 = load(sin, j, known, half, TABLE)
    TYPE: tl.constexpr = out.dtype.element_ty
    first = product(a, c1, ROUNDS, TYPE) - product(b, s1, ROUNDS, TYPE)
    second = product(b, c2, ROUNDS, TYPE) + product(a, s2, ROUNDS, TYPE)
    if PUT == "halves":
        tl.store(out + j, first.to(TYPE), mask=known)
        tl.store(out + half + j, second.to(TYPE), mask=known)
    else:
        tl.store(out + 2 * j, first.to(TYPE), mask=known)
        tl.store(out + 2 * j + 1, second.to(TYPE), mask=known)
    if NUMBERS > WIDTH:
        rest = WIDTH + tl.arange(0, REST)
        tl.store(out + rest, tl.load(x + rest, mask=rest < NUMBERS), mask=rest < NUMBERS)


def _load(
    some: tl.tensor, j: tl.tensor, known: tl.tensor, half: tl.tensor, ORDER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The two numbers of each couple as fp32."""
    if ORDER == "halves":
        one, other = tl.load(some + j, mask=known, other=0), tl.load(some + half + j, mask=known, other=0)
    elif ORDER == "pairs":
        one, other = tl.load(some + 2 * j, mask=known, other=0), tl.load(some + 2 * j + 1, mask=known, other=0)
    else:
        one = tl.load(some + j, mask=known, other=0)
        other = one
    return one.to(tl.float32), other.to(tl.float32)


def _product(one: tl.tensor, other: tl.tensor, ROUNDS: tl.constexpr, TYPE: tl.constexpr) -> tl.tensor:
    found = one * other
    if ROUNDS:
        found = found.to(TYPE).to(tl.float32)
    return found


rotate, turn, load, product = (triton.jit(function) for function in (_rotate, _turn, _load, _product))
