"""Results of an analysis as CSV: header lines that begin with # say what the figures apply to."""

from collections.abc import Mapping, Sequence

from app.services.analysis.lab import Lab, Run
from app.services.analysis.whatif import About, Row, Table, less, mean, times

Cells = dict[str, object]  # column -> value, None = unknown


def whatif(table: Table) -> str:
    """All rows with their bounds, then what else was counted with a prefetcher: every other metric, under its name in
    core.metrics."""
    return _csv(table.about, [_row(table, row) for row in table.rows], [row.more for row in table.rows])


def _row(table: Table, row: Row) -> Cells:
    bound, size, resident = table.bound(row.slots), table.about.expert_bytes or None, table.resident_ms
    return {
        "policy": row.policy,
        "predictor": row.predictor,
        "slots": row.slots,
        "share": row.slots / table.total,
        "hit_rate": row.hit_rate,
        "predicted_tpot_ms": row.tpot_ms,
        "predicted_stall_ms": row.stall_ms,
        "misses_per_token": row.misses,
        "copies_per_token": row.copies,
        "bytes_per_token": times(row.copies, size),
        "wasted_bytes_per_token": times(row.wasted, size),
        "saved_ms": row.saved_ms,
        "belady_hit_rate": bound.hit_rate,
        "hit_rate_to_belady": less(table.best_hit_rate(row.slots), row.hit_rate),
        "belady_tpot_ms": bound.tpot_ms,
        "belady_bypass_hit_rate": bound.bypass_hit_rate,
        "belady_bypass_tpot_ms": bound.bypass_tpot_ms,
        "perfect_prefetch_tpot_ms": bound.perfect_ms,
        "tpot_to_perfect_prefetch_ms": less(row.tpot_ms, bound.perfect_ms),
        "everything_resident_tpot_ms": resident,
        "tpot_to_everything_resident_ms": less(row.tpot_ms, resident),
    }


def lab(found: Lab) -> str:
    """One line per prefetcher and layer, and one with layer "all" for the means; the last columns are every other
    metric of the replay, under its name in core.metrics."""
    rows, more = list[Cells](), list[Mapping[str, float]]()
    for run in found.runs:
        layers: list[tuple[object, float | None, float | None]] = [("all", mean(run.recall), mean(run.recall_most))]
        layers += [(layer, *pair) for layer, pair in enumerate(zip(run.recall, run.recall_most, strict=True))]
        rows += [_of_layer(found, run, *layer) for layer in layers]
        more += [run.more] * len(layers)
    return _csv(found.about, rows, more)


def _of_layer(found: Lab, run: Run, layer: object, recall: float | None, recall_most: float | None) -> Cells:
    return {
        "predictor": run.predictor,
        "layer": layer,
        "recall_at_k": recall,
        "recall_at_m": recall_most,
        "m": found.most,
        "hit_rate": run.hit_rate,
        "predicted_tpot_ms": run.tpot_ms,
        "saved_ms": run.saved_ms,
        "prefetch_bytes_per_token": run.prefetch_bytes,
        "wasted_bytes_per_token": run.wasted_bytes,
        "late_rate": run.late_rate,
        "replayed_from_recording": run.replayed,
        "waited_for": run.waited_for,
        "problem": run.problem,
    }


def _csv(about: About, rows: Sequence[Cells], more: Sequence[Mapping[str, float]]) -> str:
    import pandas as pd  # here: it takes as long as the rest of the page

    cells = [
        {**row, **{f"{name}_per_token": value for name, value in of.items()}}
        for row, of in zip(rows, more, strict=True)
    ]
    return about.head() + pd.DataFrame(cells).to_csv(index=False, lineterminator="\n", float_format="%.10g")
