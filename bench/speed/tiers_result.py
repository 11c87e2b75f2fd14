"""The result of `bench tiers`: medians, ratios, bounds and goals, as data and as a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any

from bench.harness.figures import overlapped_ms
from bench.harness.paired import times
from bench.harness.protocol import Job
from bench.harness.report import goal, goal_lines, interval
from bench.harness.run import Result
from bench.models.peers import NAMES
from bench.speed.fidelity import HEADS, NOTE, shown
from core.memory.link import Pace
from core.system.wording import cell, grid

Key = tuple[str, str, str]  # system, format, budget
GIVEN = 1.0  # GB that an import may take besides the dense weights
BOUNDS = ("bound_tok_s", "belady_bound_tok_s")


@dataclass
class Runs:
    """Tokens per second and all other measurements, by configuration, variant and round."""

    tok_s: dict[Key, dict[str, list[float]]] = field(default_factory=dict)
    seen: dict[Key, dict[str, list[Job]]] = field(default_factory=dict)
    failed: dict[Key, str] = field(default_factory=dict)

    def add(self, system: str, name: str, budget: str, variant: str, tok_s: float, seen: Job) -> None:
        key = system, name, budget
        self.tok_s.setdefault(key, {}).setdefault(variant, []).append(tok_s)
        self.seen.setdefault(key, {}).setdefault(variant, []).append(seen)

    def best(self, system: str, name: str, budget: str) -> str | None:
        """The variant with the fastest median; None before the first round."""
        found = self.tok_s.get((system, name, budget), {})
        return max(found, key=lambda variant: median(found[variant])) if found else None

    def rounds(self, system: str, name: str, budget: str) -> list[float]:
        """Tokens per second of the best variant, round by round; empty when there is none."""
        return self.tok_s.get((system, name, budget), {}).get(self.best(system, name, budget) or "", [])

    def with_threads(self, system: str, name: str, budget: str, threads: int) -> list[float]:
        """As `rounds`, of the fastest variant with this number of threads."""
        word = f"{threads} thread{'s'[: threads > 1]}"
        found = [t for variant, t in self.tok_s.get((system, name, budget), {}).items() if word in variant]
        return max(found, key=median, default=[])

    def middle(self, system: str, name: str, budget: str, value: str) -> float | None:
        """The median over the rounds of another measurement of the best variant."""
        seen = self.seen.get((system, name, budget), {}).get(self.best(system, name, budget) or "", [])
        values = [one[value] for one in seen if one.get(value) is not None]
        return median(values) if values else None

    def ratio(self, ours: Key, theirs: Key) -> float | None:
        """The median of the rounds' own ratios of tokens per second."""
        pairs = zip(self.rounds(*ours), self.rounds(*theirs), strict=False)
        values = [a / b for a, b in pairs]
        return median(values) if values else None


def result(
    runs: Runs, budgets: Mapping[str, Mapping[str, int]], imports: Job, disk_gbps: float, fits: Mapping[str, Job]
) -> dict[str, Any]:
    """Everything as plain data: first the figures of the goals, then those that explain them."""
    each = {name: list(sizes) for name, sizes in budgets.items()}
    systems = sorted({system for system, _, _ in runs.tok_s})

    def by(value: str) -> dict[str, dict[str, Any]]:
        return {name: {b: runs.middle("moestro", name, b, value) for b in sizes} for name, sizes in each.items()}

    details = {name: {b: _detail(runs, name, b, disk_gbps) for b in sizes} for name, sizes in each.items()}
    return {
        "tok_s": {
            name: {b: {s: median(found) for s in systems if (found := runs.rounds(s, name, b))} for b in sizes}
            for name, sizes in each.items()
        },
        "rss_import_mb": {name: one["rss_mb"] for name, one in imports.items()},
        "import_s": {name: one["seconds"] for name, one in imports.items()},
        "open_to_first_token_s": by("first_token_s"),
        "start_to_first_token_s": by("process_s"),
        "bytes_per_token": by("disk_bytes_per_token"),
        "read_bytes_per_token": by("read_bytes_per_token"),
        "misses_x_blob": {name: {b: details[name][b]["misses_x_blob"] for b in sizes} for name, sizes in each.items()},
        "goals": goals(runs, details, imports, fits),
        "fit": dict(fits),
        "moestro": details,
        "import": imports,
        "budget_bytes": {name: dict(sizes) for name, sizes in budgets.items()},
        "variants": {
            f"{s}, {name}, {b}": {v: median(t) for v, t in found.items()}
            for (s, name, b), found in runs.tok_s.items()
            if s != "moestro"
        },
        "over": {
            f"{name}, {b}, {other}": times(ours[: len(theirs)], theirs[: len(ours)])._asdict()
            for name, sizes in each.items()
            for b in sizes
            for other in NAMES.values()
            if (ours := runs.rounds("moestro", name, b)) and (theirs := runs.rounds(other, name, b))
        },
        "peers_limits": {
            f"{other}, {name}, {b}": {
                value: runs.middle(other, name, b, value)
                for value in ("idle_bytes", "limit_bytes", "charged_bytes", "token_bytes", "prompt_s")
            }
            for other in NAMES.values()
            for name, sizes in each.items()
            for b in sizes
            if runs.middle(other, name, b, "limit_bytes")
        },
        "failed": {", ".join(key): why for key, why in runs.failed.items()},
    }


def _detail(runs: Runs, name: str, budget: str, disk_gbps: float) -> dict[str, Any]:
    """One configuration of the engine, with its bounds: the compute time (the least at any budget), or the time to read
    the misses at the disk's speed (its own, or those of Belady's cache of this size), whichever is longer."""
    found = {
        value: runs.middle("moestro", name, budget, value)
        for value in (
            *(
                "slots blob_bytes hit_rate disk_misses_per_token belady_misses_per_token repeats_of_previous_token "
                "total_ms compute_ms stall_ms idle_ms copy_ms load_s decode_threads budget_bytes used_bytes idle_bytes "
                "limit_bytes charged_bytes peak_high"
            ).split(),
        )
    }
    misses, blob = found["disk_misses_per_token"] or 0.0, int(found["blob_bytes"] or 0)
    pace, key = Pace(disk_gbps, 0.0), "compute_ms"
    compute_ms = min(
        ms
        for s, n, b in runs.tok_s
        if (s, n) == ("moestro", name)
        if (ms := runs.middle("moestro", name, b, key)) is not None
    )
    return {
        **found,
        "misses_x_blob": misses * blob,
        "bound_tok_s": 1e3 / overlapped_ms(compute_ms, misses, blob, pace),
        "belady_bound_tok_s": 1e3 / overlapped_ms(compute_ms, found["belady_misses_per_token"] or 0.0, blob, pace),
    }


def routing(runs: Runs, chance: float) -> Job:
    """The router's spread, from the first budget of the first format, and its interpretation. `chance` = the share of
    the previous token's experts that a router would choose again by chance."""
    of = (runs.middle(*key, "repeats_of_previous_token") for key in runs.tok_s if key[0] == "moestro")
    repeats = next(one for one in of if one is not None)
    return {
        "repeats_of_previous_token": repeats,
        "by_chance": chance,
        "says": f"The weights are random: no expert is trained to be popular. {repeats:.0%} of a token's experts are "
        f"those of the token before, {chance:.0%} would be by chance. Reported of trained models are 18 to 38 %, and "
        "96 % hits at half the experts (Qwen3-30B-A3B): this router is harder to cache.",
    }


def goals(
    runs: Runs, details: Mapping[str, Mapping[str, Job]], imports: Job, fits: Mapping[str, Job] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Goals, figures, and whether each goal is kept; None where it could not be measured."""
    int4, plain = ("moestro", "int4", "100%"), ("transformers", "bf16", "100%")
    found = [goal("all resident, int4 / transformers bf16, the fastest of each", ">=", 3.0, runs.ratio(int4, plain))]
    if runs.middle(*int4, "decode_threads") == 1:
        theirs = runs.with_threads(*plain, 1)
        one_each = median(a / b for a, b in zip(runs.rounds(*int4), theirs, strict=False)) if theirs else None
        found.append(goal("all resident, int4 / transformers bf16, one thread each", ">=", 3.0, one_each))
    for name in details:
        for other in NAMES.values():
            ahead = runs.ratio(("moestro", name, "50%"), (other, name, "50%"))
            found.append(goal(f"at 50 %, {name} / {other} mmap", ">=", 4.0, ahead))
    read = [
        abs((runs.middle("moestro", name, b, value) or 0.0) / one["misses_x_blob"] - 1)
        for name, sizes in details.items()
        for b, one in sizes.items()
        if one["misses_x_blob"]
        for value in ("disk_bytes_per_token", "read_bytes_per_token")
        if runs.middle("moestro", name, b, value) is not None
    ]
    fit = [abs(one["ratio"] - 1) for one in fits.values()]
    found += [
        goal("bytes read / (misses x blob), furthest from 1", "<=", 0.05, max(read, default=None)),
        goal("memory estimated / taken with a full context, furthest from 1", "<=", 0.05, max(fit, default=None)),
    ]
    for name, one in imports.items():
        over = one["rss_mb"] - one["dense_mb"] - 1e3 * GIVEN
        found.append(goal(f"import to {name}: MB over dense weights + 1 GB", "<=", 0.0, over))
    return found


def table(f: Result) -> list[str]:
    systems = ("moestro", "transformers", *NAMES.values())
    rows = []
    for name, sizes in f["tok_s"].items():
        for budget, one in sizes.items():
            d = f["moestro"][name][budget]
            megabytes = (f["bytes_per_token"][name][budget] or 0.0, d["misses_x_blob"])
            more = [*(cell(b, ".1f", 1e6) for b in megabytes), *(cell(d[b], ".1f") for b in BOUNDS)]
            rows.append((name, budget, *(cell(one.get(s)) for s in systems), f"{d['hit_rate']:.1%}", *more))
    speeds = ", ".join(f"{gbps:.2f} GB/s with {name}" for name, gbps in f["disk_gbps"].items())
    opened = {name: ", ".join(f"{b} {s:.2f}" for b, s in of.items()) for name, of in f["open_to_first_token_s"].items()}
    loads = ", ".join(map(str, f["load_average"]["rounds"]))
    lines = [
        f"Decode, tokens a second (medians of {f['rounds']} rounds; files cold; other programs with mmap below 100%):",
        *grid(("experts", "budget", *systems, "hit rate", "MB/token", "misses x blob", "bound", "Belady's"), rows),
        f"  (bound: the longer of computing alone and reading what was missed from this disk, {speeds})",
        *(f"  {over}: {interval(one)} times as fast" for over, one in f["over"].items()),
        *grid(
            ("experts", "system", *HEADS), [(n, s, *shown(a)) for n, of in f["about"].items() for s, a in of.items()]
        ),
        f"  ({NOTE})",
        f"  {f['routing']['says']}",
        "Import and open:",
        *grid(
            ("experts", "import s", "peak MB over idle", "dense MB", "open to first token s"),
            [
                (
                    n,
                    *(cell(one[k], form) for k, form in (("seconds", ".1f"), ("rss_mb", ".0f"), ("dense_mb", ".0f"))),
                    opened[n],
                )
                for n, one in f["import"].items()
            ],
        ),
    ]
    if f["fit"]:
        lines.append(
            "Memory with a full context, MB: estimated before the load, and taken by the process (without files):"
        )
        sizes = ("estimated_bytes", "taken_bytes")
        lines += grid(
            ("", "", ""), [(k, *(cell(one[size], ".0f", 1e6) for size in sizes)) for k, one in f["fit"].items()]
        )
    return [
        *lines,
        "Goals:",
        *goal_lines(f["goals"]),
        *(f"  {key}: {why}" for key, why in f["failed"].items()),
        f"Memory limit: {f['memory_limit_method']}",
        f"Cold files: {f['cold_cache_method']}",
        f"Load average before and after each round: {f['load_average']['before']}, {loads}; the disk's readahead is "
        f"{f['machine']['read_ahead_kb']} kB",
    ]
