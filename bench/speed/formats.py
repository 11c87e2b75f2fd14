"""bench formats: speed, size and accuracy of every expert format on a CPU, on one expert as large as Qwen3-30B-A3B's.

Weights are drawn from Student's t with 4 degrees of freedom, whose tails are as heavy as trained ones. Every round
times every format on more slots than processor caches hold, on one thread.
"""

from __future__ import annotations

import functools
from statistics import median

import torch

from bench.harness.figures import ratio
from bench.harness.report import cells, grid
from bench.harness.run import Result, Run, Suite
from core.memory.codec import Codec, Numbers, make_codec
from core.memory.codec.measure import ffn_error, fill, milliseconds, products, random_expert, specs_of
from core.settings.formats import LOADABLE

FREEDOM = 4
SLOTS_BYTES = 48 << 20  # slots that are cycled through: more than a core's caches hold
CPU = torch.device("cpu")
STORED = Numbers(torch.bfloat16, torch.bfloat16, torch.bfloat16)
COLUMNS = {
    "blob_bits": (".2f", "blob bits"),
    "slot_bits": (".2f", "slot bits"),
    "weight_error": (".4f", "error"),
    "output_error": (".4f", "of output"),
    "ffn_ms": (".3f", "FFN ms"),
    "ffn_ratio": (".3f", "/ bf16"),
    "place_ms": (".3f", "copy ms"),
    "place_ms_per_mb": (".3f", "ms/MB"),
    "encode_ms": (".1f", "encode ms"),
}


class Filled:
    """One format, filled into slots, and what does not change over rounds."""

    def __init__(self, name: str, parts: dict[str, torch.Tensor], small: bool) -> None:
        codec: Codec = make_codec(name, specs=specs_of(parts), dtype=torch.bfloat16, device=CPU, stored=STORED)
        self.codec, self.seconds, weights = codec, 0.02 if small else 0.2, sum(t.numel() for t in parts.values())
        encode_ms = milliseconds(functools.partial(codec.encode, parts), self.seconds)
        self.blob, self.raw = codec.encode(parts), torch.empty(codec.slot_bytes, dtype=torch.uint8)
        self.slots = [fill(codec, parts) for _ in range(2 if small else max(2, SLOTS_BYTES // codec.slot_bytes))]
        missed = [(codec.dequantize(self.slots[0], n).float() - t).square().sum() for n, t in parts.items()]
        self.about = {
            "blob_bits": codec.blob_bytes * 8 / weights,
            "slot_bits": codec.slot_bytes * 8 / weights,
            "weight_error": float((sum(missed) / sum(t.square().sum() for t in parts.values())) ** 0.5),
            "output_error": ffn_error(codec, parts),
            "encode_ms": encode_ms,
            "verbatim": codec.verbatim,
            "form": type(codec).__name__,
        }

    def times(self, x: torch.Tensor) -> tuple[float, float]:
        """Milliseconds of one token's products, and of one copy into a slot."""
        ffn_ms = products(self.codec.linear, self.slots, x, self.seconds)
        return ffn_ms, milliseconds(functools.partial(self.codec.place, self.blob, self.raw), self.seconds)


def measure(run: Run, rounds: int = 5, hidden: int = 2048, inner: int = 768) -> Result:
    run.one_thread()
    parts, filled = random_expert(hidden, inner, freedom=FREEDOM), dict[str, Filled]()
    for name in LOADABLE:
        run.say(f"packing as {name}")
        filled[name] = Filled(name, parts, run.small)
    x = torch.randn(1, hidden, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = run.by_turns(LOADABLE, lambda name, number: filled[name].times(x), rounds, warm=False)
    ffn_ms, place_ms = ({name: [one[at] for one in of] for name, of in found.items()} for at in (0, 1))
    rows = {
        name: {
            **one.about,
            "ffn_ms": median(ffn_ms[name]),
            "ffn_ratio": ratio(ffn_ms[name], ffn_ms["checkpoint"]),
            "place_ms": median(place_ms[name]),
            "place_ms_per_mb": median(place_ms[name]) / (one.codec.blob_bytes / 1e6),
        }
        for name, one in filled.items()
    }
    return {
        "freedom": FREEDOM,
        "dtype": "bfloat16",
        "int4_ffn_ratio": rows["int4-g64"]["ffn_ratio"],
        "int4_place_ms_per_mb": rows["int4-g64"]["place_ms_per_mb"],
        "quickest": min(rows, key=lambda name: float(str(rows[name]["ffn_ratio"]))),
        "formats": rows,
    }


def table(r: Result) -> list[str]:
    forms = {name: form for name, (form, _) in COLUMNS.items()}
    return [
        f"One expert, hidden {r['hidden']}, intermediate {r['inner']}, Student-t weights, {r['device']}; bits a "
        "weight, relative errors, times of one token's FFN, of a copy into a slot and of encoding:",
        *grid(
            ("format", *(head for _, head in COLUMNS.values())),
            [(name, *cells(one, forms)) for name, one in r["formats"].items()],
        ),
    ]


SUITE = Suite(measure, table, small={"hidden": 256, "inner": 128})
