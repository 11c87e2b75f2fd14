"""The result of `bench batch` as a table."""

from collections.abc import Mapping

from bench.harness.report import goal, goal_lines, headline
from bench.harness.run import Result
from core.system.wording import grid

PLACES = {"link": "over an emulated link of {:.3g} GB/s", "disk": "from disk"}
COLUMNS = {
    "pass_ms": (".1f", "pass ms"),
    "prefill_share": (".0%", "prompts"),
    "stall_share": (".0%", "waiting"),
    "union": (".1f", "union"),
    "tokens_per_expert": (".2f", "tokens an expert"),
    "hit_rate": (".1%", "hits"),
}
BYTES = ("bytes_per_token", "least_bytes_per_token")


def table(f: Result) -> list[str]:
    sizes = [str(size) for size in f["sizes"]]
    lines = [
        f"{headline(f)}; prompts of {f['prompt_tokens']} tokens, answers of {f['tokens']}, medians of {f['rounds']} "
        "rounds",
        *grid(
            ("at a time", *sizes),
            [("transformers, all resident, tok/s", *(f"{f['transformers'][n]:.1f}" for n in sizes))],
        ),
    ]
    for place, what in PLACES.items():
        for share, rows in f[place].items():
            lines += [f"{share} of the experts resident, {what.format(f['link_gbps'])}", *_rows(rows)]
    half = f["sizes"][-1] // 2
    caches = [
        (n, *(f"{rows[s]['hit_rate']:.1%}, {rows[s]['tok_s']:.1f}" for s in sizes)) for n, rows in f["caches"].items()
    ]
    schedulers = [
        (
            name,
            *(format(row[figure], form) for figure, form in (("tok_s", ".1f"), ("pass_ms", ".1f"), ("union", ".1f"))),
            f"{row['hit_rate']:.1%}",
            f"{row['bytes_per_token'] / 1e6:.3f}",
            f"{row['scheduled_ms']:.2f}",
        )
        for name, row in f["schedulers"].items()
    ]
    lines += [
        "half of the experts resident, over the emulated link, by cache: hits, tok/s",
        *grid(("at a time", *sizes), caches),
        f"{2 * half} prompts as two batches of {half}, regrouped for every token",
        *grid(("", "tok/s", "pass ms", "union", "hits", "MB a token", "scheduling ms"), schedulers),
    ]
    return [
        *lines,
        *goal_lines([goal("16 at a time over one, half resident", ">=", f["goal"], f["gain"])]),
        f"  with {f['quickest']}, the fastest cache for 16, over the same one: {f['gain_quickest']:.2f}; at most, "
        f"if the link never idled: {f['gain_frugal']:.2f} with the copies of {f['frugal']}, which made the fewest, "
        f"{f['gain_bound']:.2f} with those that no cache can do without",
    ]


def _rows(rows: Mapping[str, Mapping[str, float]]) -> list[str]:
    one, lines = rows["1"], []
    for size, row in rows.items():
        copied = row["bytes_per_token"]
        lines.append(
            (
                size,
                f"{row['tok_s']:.1f}",
                f"{row['tok_s'] / one['tok_s']:.2f}",
                f"{one['bytes_per_token'] / copied:.2f}" if copied else "-",
                *(format(row[figure], form) for figure, (form, _) in COLUMNS.items()),
                *(f"{row[figure] / 1e6:.3f}" for figure in BYTES),
            )
        )
    heads = [head for _, head in COLUMNS.values()]
    return grid(("at a time", "tok/s", "gain", "by bytes", *heads, "MB a token", "at least"), lines)
