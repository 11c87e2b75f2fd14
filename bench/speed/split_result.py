"""The result of `bench split` as a table."""

from collections.abc import Mapping, Sequence
from typing import Any

from bench.harness.report import headline
from bench.harness.run import Result
from core.system.wording import cell, grid

HEADS = ("configuration", "TPOT ms", "wait ms", "TTFT ms", "hits", "tops a token", "copied MB", "predicted ms")


def table(f: Result) -> list[str]:
    lines = [
        f"{headline(f)}, in {f['blocks']} blocks, budget {f['budget']}, medians of {f['rounds']} rounds of "
        f"{f['tokens']} tokens",
        f"  everything resident: whole {f['resident_ms']['whole']:.2f}, in blocks {f['resident_ms']['split']:.2f} ms a "
        f"token; predicting takes {f['predict_ms']:.2f}",
    ]
    for name, link in f["links"].items():
        pace = f"emulated, {link['gbps']:g} GB/s" if link["emulated"] else "measured"
        lines += [
            f"{name} ({pace}; an expert takes {link['load_ms']:.3g} ms)",
            *grid(
                HEADS, [_cells(row, values, link["predicted_over_measured"]) for row, values in link["rows"].items()]
            ),
            f"  MoEpic over the best plain cache ({link['best_plain']}): {cell(link['gain'])} times as fast; the "
            f"best part is {link['best_theta']}: {cell(link['gain_of_best_theta'])} times",
        ]
    return [*lines, *_expected(f["expected"])]


def _cells(name: str, row: Mapping[str, Any], predicted: Mapping[str, float]) -> Sequence[str]:
    if "tpot_ms" not in row:
        return (f"{name}: {row.get('problem', 'not measured')}", *[""] * (len(HEADS) - 1))
    return (
        name,
        *(cell(row[figure]) for figure in ("tpot_ms", "stall_ms")),
        f"{row['ttft_ms']:.1f}",
        f"{row['hit_rate'] or 0.0:.1%}",
        f"{row['top_hits']:.1f}",
        f"{(row['demand_bytes'] + row['prefetch_bytes']) / 1e6:.3f}",
        cell(predicted[name] * row["tpot_ms"] if name in predicted else None),
    )


def _expected(found: Sequence[Mapping[str, float]]) -> list[str]:
    """What the latency model expects splitting to save, by budget and by the time of a copy."""
    shares, loads = (sorted({one[name] for one in found}) for name in ("share", "load"))
    at = {(one["share"], one["load"]): one["whole_ms"] / one["plan_ms"] for one in found}
    return [
        "By the latency model, not measured: TPOT of whole experts in even layers over that of the plan, both with "
        "MoEpic's prefetches, by share of the experts:",
        *grid(
            ("copy / layer", *(f"{share:.0%}" for share in shares)),
            [(f"{load:g}", *(f"{at[share, load]:.2f}" for share in shares)) for load in loads],
        ),
    ]
