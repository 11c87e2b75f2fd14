"""bench formats: speed, size and accuracy of every expert format on a CPU, on one expert as large as Qwen3-30B-A3B's.

Weights are drawn from Student's t with 4 degrees of freedom, whose tails are as heavy as trained ones. Every round
times every format in turn, on more slots than processor caches hold; times are medians over the rounds, and ratios to
bfloat16 medians of the rounds' own ratios, so that a slowdown of the machine affects both sides. On one thread.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from core.memory.codec import Codec, Numbers, make_codec
from core.memory.codec.measure import ffn_error, fill, milliseconds, products, random_expert, specs_of
from core.session.manifest import device_name, versions
from core.settings.formats import LOADABLE

HIDDEN, INNER, FREEDOM = 2048, 768, 4
SLOTS_BYTES = 48 << 20  # slots that are cycled through: more than a core's caches hold
CPU = torch.device("cpu")
STORED = Numbers(torch.bfloat16, torch.bfloat16, torch.bfloat16)


class Timed:
    """One format, filled into slots, and its measurements."""

    def __init__(self, name: str, parts: dict[str, torch.Tensor], small: bool) -> None:
        codec: Codec = make_codec(name, specs=specs_of(parts), dtype=torch.bfloat16, device=CPU, stored=STORED)
        self.codec, weights = codec, sum(t.numel() for t in parts.values())
        self.seconds = 0.02 if small else 0.2
        self.encode_ms = milliseconds(functools.partial(codec.encode, parts), self.seconds)
        self.blob = codec.encode(parts)
        self.raw = torch.empty(codec.slot_bytes, dtype=torch.uint8)
        self.slots = [fill(codec, parts) for _ in range(2 if small else max(2, SLOTS_BYTES // codec.slot_bytes))]
        self.blob_bits, self.slot_bits = codec.blob_bytes * 8 / weights, codec.slot_bytes * 8 / weights
        missed = [(codec.dequantize(self.slots[0], n).float() - t).square().sum() for n, t in parts.items()]
        every = [t.square().sum() for t in parts.values()]
        self.weight_error = float((sum(missed) / sum(every)) ** 0.5)
        self.output_error = ffn_error(codec, parts)
        self.ffn_ms: list[float] = []
        self.place_ms: list[float] = []

    def round(self, x: torch.Tensor) -> None:
        """Times one token's products and one copy into a slot."""
        self.ffn_ms.append(products(self.codec.linear, self.slots, x, self.seconds))
        self.place_ms.append(milliseconds(functools.partial(self.codec.place, self.blob, self.raw), self.seconds))

    def row(self, base: Timed) -> dict[str, object]:
        """All measurements as plain data. `base` is bfloat16."""
        place = statistics.median(self.place_ms)
        return {
            "blob_bits": self.blob_bits,
            "slot_bits": self.slot_bits,
            "weight_error": self.weight_error,
            "output_error": self.output_error,
            "ffn_ms": statistics.median(self.ffn_ms),
            "ffn_ratio": statistics.median(a / b for a, b in zip(self.ffn_ms, base.ffn_ms, strict=True)),
            "place_ms": place,
            "place_ms_per_mb": place / (self.codec.blob_bytes / 1e6),
            "encode_ms": self.encode_ms,
            "verbatim": self.codec.verbatim,
            "form": type(self.codec).__name__,
        }


def run(rounds: int = 5, small: bool = False, say: Callable[[str], None] = print) -> dict[str, object]:
    """Measures; returns the result as plain data. `small` = a tiny expert, for a quick check."""
    hidden, inner = (256, 128) if small else (HIDDEN, INNER)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        parts = random_expert(hidden, inner, freedom=FREEDOM)
        timed = {}
        for name in LOADABLE:
            say(f"packing as {name}")
            timed[name] = Timed(name, parts, small)
        x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
        for number in range(1, rounds + 1):
            say(f"round {number} of {rounds}")
            for one in timed.values():
                one.round(x)
        base = timed["checkpoint"]
        rows = {name: one.row(base) for name, one in timed.items()}
        int4, quickest = rows["int4-g64"], min(rows, key=lambda name: float(str(rows[name]["ffn_ratio"])))
        return {
            "hidden": hidden,
            "inner": inner,
            "freedom": FREEDOM,
            "rounds": rounds,
            "dtype": "bfloat16",
            "int4_ffn_ratio": int4["ffn_ratio"],
            "int4_place_ms_per_mb": int4["place_ms_per_mb"],
            "quickest": quickest,
            "formats": rows,
            "device": device_name(CPU),
            "versions": versions(),
        }
    finally:
        torch.set_num_threads(threads)


def table(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        f"One expert, hidden {result['hidden']}, intermediate {result['inner']}, Student-t weights, "
        f"{result['device']}:",
        "  format          bits/weight        error of        one token's FFN      copy into a slot   encode",
        "                  blob   slot   weights  output      ms   / bf16        ms   ms/MB      ms",
    ]
    lines += [
        f"  {name:14s} {r['blob_bits']:5.2f}  {r['slot_bits']:5.2f}  {r['weight_error']:8.4f} "
        f"{r['output_error']:7.4f}  {r['ffn_ms']:6.3f}  {r['ffn_ratio']:6.3f}  {r['place_ms']:8.3f}  "
        f"{r['place_ms_per_mb']:6.3f}  {r['encode_ms']:6.1f}"
        for name, r in result["formats"].items()
    ]
    return "\n".join(lines)
