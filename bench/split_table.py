"""The result of `bench split` as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    f = found
    lines = [
        f"{f['model']}: {f['layers']} layers of {f['experts']} experts in {f['blocks']} blocks, budget {f['budget']}, "
        f"medians of {f['rounds']} rounds of {f['tokens']} tokens",
        f"  everything resident: whole {f['resident_ms']['whole']:.2f}, in blocks {f['resident_ms']['split']:.2f} ms a "
        f"token; predicting takes {f['predict_ms']:.2f}",
    ]
    for name, link in f["links"].items():
        pace = f"emulated, {link['gbps']:g} GB/s" if link["emulated"] else "measured"
        lines += [
            "",
            f"{name} ({pace}; an expert takes {link['load_ms']:.3g} ms)",
            "  configuration            TPOT ms  wait ms  TTFT ms  hits  tops a token  copied MB  predicted ms",
        ]
        predicted = link["predicted_over_measured"]
        for row, values in link["rows"].items():
            if "tpot_ms" not in values:
                lines.append(f"  {row:24s} {values.get('problem', 'not measured')}")
                continue
            expected = f"{predicted[row] * values['tpot_ms']:12.2f}" if row in predicted else f"{'-':>12s}"
            lines.append(
                f"  {row:24s} {values['tpot_ms']:7.2f} {values['stall_ms']:8.2f} {values['ttft_ms']:8.1f} "
                f"{values['hit_rate'] or 0.0:5.1%} {values['top_hits']:13.1f} "
                f"{(values['demand_bytes'] + values['prefetch_bytes']) / 1e6:10.3f} {expected}"
            )
        lines.append(
            f"  MoEpic over the best plain cache ({link['best_plain']}): {_ratio(link['gain'])}; the best part is "
            f"{link['best_theta']}: {_ratio(link['gain_of_best_theta'])}"
        )
    return "\n".join([*lines, "", *_expected(f["expected"])])


def _expected(found: Sequence[Mapping[str, float]]) -> list[str]:
    """What the latency model expects splitting to save, by budget and by the time of a copy."""
    shares, loads = (sorted({one[name] for one in found}) for name in ("share", "load"))
    at = {(one["share"], one["load"]): one["whole_ms"] / one["plan_ms"] for one in found}
    return [
        "By the latency model, not measured: whole experts in even layers over the plan, TPOT, both with MoEpic's "
        "prefetches",
        "  copy / layer  " + "".join(f"{share:>8.0%}" for share in shares) + "  of the experts",
        *(f"  {load:12g}  " + "".join(f"{at[share, load]:8.2f}" for share in shares) for load in loads),
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} times as fast"
