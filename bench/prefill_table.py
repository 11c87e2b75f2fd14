"""The result of `bench prefill` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    f, words = found, {True: "kept", False: "MISSED", None: "not measured"}
    lines = [
        f"{f['model']}: prompts, medians of {f['rounds']} rounds, {f['threads']} threads",
        "  experts  budget  tokens   tok/s  transformers  ratio  read/missing  over bound  bits of transformers",
    ]
    for name, sizes in f["prefill_ratio"].items():
        for budget, ratios in sizes.items():
            for length, ratio in ratios.items():
                same = f["same_bits"][budget][length] if name == "bf16" else None
                lines.append(
                    f"  {name:8s} {budget:>6s} {length:>7s} {f['tok_s'][f'{name} {budget}'][length]:7.1f} "
                    f"{f['tok_s']['transformers'][length]:13.1f} {ratio:6.2f} "
                    f"{_shown(f['read_over_missing'][name][budget][length])} "
                    f"{_shown(f['over_bound'][name][budget][length])[2:]}  "
                    f"{'-' if same is None else 'the same' if same else 'DIFFERENT'}"
                )
    for budget, ratios in f["int4_over_bf16"].items():
        lines.append(f"  int4 over bf16 at {budget}: " + ", ".join(f"{n} tokens {r:.2f}" for n, r in ratios.items()))
    for name, ratios in f.get("over_llama", {}).items():
        if ratios:
            shown = ", ".join(f"{n} tokens {r:.2f}" for n, r in ratios.items())
            lines.append(f"  {name} at 100% over llama.cpp's: {shown}")
    lines.append("  (bound: the longer of computing alone and reading the missing experts once from this disk)")
    lines += [
        f"  {g['goal']}: {'-' if g['found'] is None else format(g['found'], '.3g')} "
        f"({g['sign']} {g['asked']:g}) {words[g['kept']]}"
        for g in f["goals"]
    ]
    return "\n".join(lines)


def _shown(value: float | None) -> str:
    return f"{'-':>13s}" if value is None else f"{value:13.2f}"
