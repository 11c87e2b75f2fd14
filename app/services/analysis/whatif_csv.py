"""The what-if table as CSV."""

import csv
import io

from app.services.analysis import whatif

COLUMNS = (
    "policy",
    "predictor",
    "slots",
    "share",
    "hit_rate",
    "predicted_tpot_ms",
    "predicted_stall_ms",
    "misses_per_token",
    "copies_per_token",
    "bytes_per_token",
    "wasted_bytes_per_token",
    "saved_ms",
    "belady_hit_rate",
    "hit_rate_to_belady",
    "belady_tpot_ms",
    "belady_bypass_hit_rate",
    "belady_bypass_tpot_ms",
    "perfect_prefetch_tpot_ms",
    "tpot_to_perfect_prefetch_ms",
    "everything_resident_tpot_ms",
    "tpot_to_everything_resident_ms",
)


def to_csv(table: whatif.Table) -> str:
    """All rows with their bounds, then what else was counted with a prefetcher: every other metric, under its name in
    core.metrics. Header lines that begin with # say what the figures apply to."""
    out = io.StringIO()
    about = table.about
    out.write(about.head())
    writer = csv.writer(out, lineterminator="\n")
    more = list(dict.fromkeys(name for row in table.rows for name in row.more))
    writer.writerow([*COLUMNS, *(f"{name}_per_token" for name in more)])
    size, resident = about.expert_bytes or None, table.resident_ms
    for row in table.rows:
        bound = table.bound(row.slots)
        writer.writerow(
            [
                "" if value is None else f"{value:.10g}" if isinstance(value, float) else value
                for value in (
                    row.policy,
                    row.predictor,
                    row.slots,
                    row.slots / table.total,
                    row.hit_rate,
                    row.tpot_ms,
                    row.stall_ms,
                    row.misses,
                    row.copies,
                    whatif.times(row.copies, size),
                    whatif.times(row.wasted, size),
                    row.saved_ms,
                    bound.hit_rate,
                    whatif.less(table.best_hit_rate(row.slots), row.hit_rate),
                    bound.tpot_ms,
                    bound.bypass_hit_rate,
                    bound.bypass_tpot_ms,
                    bound.perfect_ms,
                    whatif.less(row.tpot_ms, bound.perfect_ms),
                    resident,
                    whatif.less(row.tpot_ms, resident),
                    *(row.more.get(name) for name in more),
                )
            ]
        )
    return out.getvalue()
