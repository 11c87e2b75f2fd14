"""The result of `bench systems` as text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.store.results import BOUNDS

HEAD = (
    f"  {'':32s} {'TTFT':>8s} {'TPOT':>8s} {'compute':>8s} {'predict':>8s} {'stall':>8s} {'idle':>8s} {'hits':>7s} "
    f"{'demand':>8s} {'prefetch':>8s} {'wasted':>8s}"
)


def table(result: Mapping[str, Any]) -> str:
    """A block of lines for every budget: the systems by time per token, and the bounds."""
    gbps = result["link_gbps"]
    lines = [
        f"{result['model']}: {result['layers']} layers of {result['experts']} experts, {result['top_k']} active; "
        f"{result['tokens']} decoded tokens after {result['prompts']} prompts, {result['rounds']} rounds; link: "
        + (f"EMULATED, {gbps:g} GB/s" if result["link"] == "emulated" else f"this machine's own, {gbps:g} GB/s"),
        "Times in ms, MB a token. TPOT = compute + predict + stall + idle, in the round with the median TPOT.",
    ]
    for budget, about in result["budgets"].items():
        lines += [f"Budget {budget}: {about['slots']} slots, {about['share']:.1%} of the experts", HEAD]
        rows = [(result["titles"][name], found[budget]) for name, found in result["systems"].items()]
        for title, one in sorted(rows, key=lambda row: row[1].get("tpot_ms", float("inf"))):
            lines.append(f"  {title:32s} {one['problem'] or _cells(one)}")
        for name, bound in result["bounds"][budget].items():
            hits = "" if bound.get("hit_rate") is None else f"{bound['hit_rate']:.1%}"
            ms = "" if bound["tpot_ms"] is None else f"{bound['tpot_ms']:.2f}"
            lines.append(f"  {'= ' + BOUNDS[name]:32s} {'':8s} {ms:>8s} {'':35s} {hits:>7s}")
    lossy = [line for name in result["systems"] for line in _quality(result, name)]
    if lossy:
        exact = result["exact_quality"]
        lines += [
            "Systems that change answers (all others are exact):",
            f"  {'':40s} {'match':>8s} {'unseen':>8s} {'agree':>8s} {'KL':>8s} {'perpl.':>8s} {'changed':>8s}",
            *([f"  {'= Exact':40s} {_judged(exact)}"] if exact else []),
            *lossy,
        ]
    if (result.get("others_cores") or 0.0) > 0.3:
        lines.append(f"Other programs used {result['others_cores']:.1f} CPU cores meanwhile: its times mean little.")
    return "\n".join(lines)


def _cells(one: Mapping[str, Any]) -> str:
    times = (
        one["ttft_ms"],
        one["tpot_ms"],
        one["compute_ms"] - one["predict_ms"],
        one["predict_ms"],
        one["stall_ms"],
        one["idle_ms"],
    )
    sizes = (one[f"{name}_bytes"] / 1e6 for name in ("demand", "prefetch", "wasted"))
    return (
        " ".join(f"{value:8.2f}" for value in times)
        + f" {one['hit_rate'] or 0.0:7.1%} "
        + " ".join(f"{value:8.3f}" for value in sizes)
        + ("" if one["exact"] else "  LOSSY")
    )


def _quality(result: Mapping[str, Any], name: str) -> list[str]:
    return [
        f"  {result['titles'][name] + ' at ' + budget:40s} {judged['problem'] or _judged(judged)}"
        for budget, one in result["systems"][name].items()
        if (judged := one["quality"]) is not None
    ]


def _judged(one: Mapping[str, Any]) -> str:
    forms = (
        ("exact_match", "{:.1%}"),
        ("unseen_match", "{:.1%}"),
        ("agreement", "{:.1%}"),
        ("kl", "{:.3f}"),
        ("perplexity", "{:.1f}"),
        ("substituted_rate", "{:.1%}"),
    )
    return " ".join(f"{'-' if one[name] is None else form.format(one[name]):>8s}" for name, form in forms)
