"""The result of `bench batch` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PLACES = {"link": "over an emulated link of {:.3g} GB/s", "disk": "from disk"}


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    f, plain = found, found["transformers"]
    lines = [
        f"{f['model']}: {f['layers']} layers of {f['experts']} experts, {f['top_k']} a token; prompts of "
        f"{f['prompt_tokens']} tokens, answers of {f['tokens']}, medians of {f['rounds']} rounds",
        "",
        "  at a time                        " + "".join(f"{size:>9d}" for size in f["sizes"]),
        "  transformers, all resident, tok/s" + "".join(f"{plain[str(size)]:9.1f}" for size in f["sizes"]),
    ]  # fmt: skip
    for place, what in PLACES.items():
        for share, rows in f[place].items():
            lines += ["", f"{share} of the experts resident, {what.format(f['link_gbps'])}", *_rows(rows)]
    lines += ["", "half of the experts resident, over the emulated link, by cache"]
    for name, rows in f["caches"].items():
        hits = "  ".join(f"{size}: {row['hit_rate']:.1%}" for size, row in rows.items())
        speed = "  ".join(f"{size}: {row['tok_s']:.1f}" for size, row in rows.items())
        lines.append(f"  {name:14s} hits {hits}   tok/s {speed}")
    half = f["sizes"][-1] // 2
    lines += ["", f"  {2 * half} prompts as two batches of {half}, regrouped for every token"]
    for name, row in f["schedulers"].items():
        lines.append(
            f"  {name:20s} {row['tok_s']:7.1f} tok/s  pass {row['pass_ms']:6.1f} ms  union {row['union']:5.1f}  hits "
            f"{row['hit_rate']:.1%}  {row['bytes_per_token'] / 1e6:.3f} MB a token  "
            f"scheduling {row['scheduled_ms']:.2f} ms"
        )
    for size, rows in f.get("accuracy", {}).items():
        lines += ["", f"  a batch of {size}: share of the experts needed that were named before, experts named a layer"]
        for name, row in rows.items():
            took = f"  {row['ms']:.2f} ms" if "ms" in row else ""
            lines.append(f"    {name:24s} {row['accuracy']:6.1%} {row['named']:6.1f}{took}")
    goal = "kept" if f["gain"] >= f["goal"] else "MISSED"
    lines += [
        "",
        f"  16 at a time over one, half resident: {f['gain']:.2f} (>= {f['goal']:g}) {goal}; with {f['quickest']}, the "
        f"quickest cache for 16, over the same one: {f['gain_quickest']:.2f}",
        f"  at most, if the link never rested: {f['gain_frugal']:.2f} with the copies of {f['frugal']}, who made the "
        f"fewest; {f['gain_bound']:.2f} with those that no cache can do without",
    ]
    return "\n".join(lines)


def _rows(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    one = rows["1"]
    lines = [
        "  at a time   tok/s   gain  by bytes  pass ms  prompts  waiting  union  tokens an expert   hits  MB a token"
        "  at least"
    ]
    for size, row in rows.items():
        by_bytes = f"{one['bytes_per_token'] / row['bytes_per_token']:8.2f}" if row["bytes_per_token"] else f"{'-':>8s}"
        lines.append(
            f"  {size:>9s} {row['tok_s']:7.1f} {row['tok_s'] / one['tok_s']:6.2f}  {by_bytes} {row['pass_ms']:8.1f} "
            f"{row['prefill_share']:8.0%} {row['stall_share']:8.0%} {row['union']:6.1f} "
            f"{row['tokens_per_expert']:17.2f} {row['hit_rate']:6.1%} {row['bytes_per_token'] / 1e6:11.3f} "
            f"{row['least_bytes_per_token'] / 1e6:9.3f}"
        )
    return lines
