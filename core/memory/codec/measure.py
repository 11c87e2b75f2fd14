"""Measure every format on this machine: `python -m core.memory.codec.measure [hidden] [intermediate] [dtype]`.

Prints, for one gated expert: bytes of its blob and slot, error of its output against fp32, milliseconds to encode and
to place, and the time of its matrix products for 1..128 rows, relative to torch.mm on unquantised weights of the same
dtype: in the reference arithmetic, which dequantises, and below in the fast one. Calls cycle through 32 MB or more of
slots, as in a running engine. Single-threaded.
"""

import functools
import sys
import time
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from core.memory.codec import Codec, PartSpec, SlotParts, make_codec
from core.memory.codec.base import Base
from core.memory.codec.fast.products import CanonicalProducts, serves
from core.memory.codec.matrix import matrix
from core.settings.formats import LOADABLE

Linear = Callable[[SlotParts, str, torch.Tensor], torch.Tensor]
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)


def random_expert(hidden: int, inner: int) -> dict[str, torch.Tensor]:
    """Weights of one gated expert, fp32, normally distributed: gate_up_proj [2 * inner, hidden], down_proj [hidden,
    inner]."""
    rng, shapes = torch.Generator().manual_seed(0), {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}
    return {name: torch.randn(shape, generator=rng).mul_(0.02) for name, shape in shapes.items()}


def specs_of(parts: Mapping[str, torch.Tensor]) -> dict[str, PartSpec]:
    """The specs of parts given as tensors."""
    return {n: PartSpec(tuple(t.shape), t.dtype) for n, t in parts.items()}


def fill(codec: Codec, parts: Mapping[str, torch.Tensor]) -> SlotParts:
    """Encode an expert and place it in a new slot."""
    slot = torch.empty(codec.slot_bytes, dtype=torch.uint8, device=codec.device)
    codec.place(codec.encode(parts), slot)
    return codec.views(slot)


def ffn(linear: Linear, parts: SlotParts, x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, then down: x [n, hidden] -> [n, hidden]."""
    gate, up = linear(parts, "gate_up_proj", x).chunk(2, -1)
    return linear(parts, "down_proj", F.silu(gate) * up)


def ffn_error(codec: Codec, parts: Mapping[str, torch.Tensor]) -> float:
    """Relative error (Frobenius norm) of the format's output against fp32 with the given weights [out, in]."""
    x = torch.randn(16, parts["down_proj"].shape[0], generator=torch.Generator().manual_seed(1)).to(codec.dtype)
    gate, up = (x.float() @ parts["gate_up_proj"].t()).chunk(2, -1)
    reference = (F.silu(gate) * up) @ parts["down_proj"].t()
    y = ffn(codec.linear, fill(codec, parts), x.to(codec.device)).cpu().float()
    return float((y - reference).norm() / reference.norm())


def milliseconds(call: Callable[[], object], seconds: float = 0.2) -> float:
    """Time of a call: the 10th percentile, which is least affected by other programs."""
    times: list[float] = []
    call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[len(times) // 10]


def products(linear: Linear, slots: list[SlotParts], x: torch.Tensor, seconds: float = 0.2) -> float:
    """Milliseconds of one expert's products, with a different slot at each call."""
    turn = 0

    def call() -> None:
        nonlocal turn
        turn += 1
        ffn(linear, slots[turn % len(slots)], x)

    return milliseconds(call, seconds)


def main(hidden: int = 2048, inner: int = 768, dtype: str = "bfloat16") -> None:
    """Print the table."""
    torch.set_num_threads(1)
    parts, number = random_expert(hidden, inner), getattr(torch, dtype)
    print(f"hidden {hidden}, intermediate {inner}, {dtype}, {torch.backends.cpu.get_cpu_capability()}")
    print("format          blob MB slot MB  error  encode place | rows: " + " ".join(f"{r:>5}" for r in ROWS))
    base: list[float] = []
    for name in LOADABLE:
        codec = make_codec(name, specs=specs_of(parts), dtype=number, device=torch.device("cpu"))
        blob, slot = codec.encode(parts), torch.empty(codec.slot_bytes, dtype=torch.uint8)
        slots = [fill(codec, parts) for _ in range(max(2, (32 << 20) // codec.slot_bytes))]
        inputs = [torch.randn(r, hidden).to(number) for r in ROWS]
        times = [products(codec.linear, slots, x) for x in inputs]
        base = base or times  # of unquantised weights, the first
        encode = milliseconds(functools.partial(codec.encode, parts))
        place = milliseconds(functools.partial(codec.place, blob, slot))
        print(
            f"{name:<15}{codec.blob_bytes / 1e6:>8.2f}{codec.slot_bytes / 1e6:>8.2f}{ffn_error(codec, parts):>8.4f}"
            f"{encode:>8.1f}{place:>6.2f} |       {_relative(times, base)}"
        )
        if (fast := _fast(codec)) is not None:
            print(f"{f'{name}, fast':<53}|       {_relative([products(fast, slots, x) for x in inputs], base)}")
    print("torch.mm, ms                                         |       " + " ".join(f"{b:>5.2f}" for b in base))


def _fast(codec: Codec) -> Linear | None:
    """The canonical product; None where this machine has no kernels for it."""
    assert isinstance(codec, Base)
    found = {part: matrix(codec, part) for part in codec.weights}
    if not all(map(serves, found.values())):
        return None
    made = {part: CanonicalProducts(one, codec.dtype) for part, one in found.items()}
    for one in made.values():
        one.choose(1)
    return lambda parts, part, x: made[part].many(parts.at, x)


def _relative(times: list[float], base: list[float]) -> str:
    return " ".join(f"{t / b:>5.2f}" for t, b in zip(times, base, strict=True))


if __name__ == "__main__":
    given = sys.argv[1:]
    main(*(int(a) for a in given[:2]), *given[2:])  # type: ignore[arg-type]
