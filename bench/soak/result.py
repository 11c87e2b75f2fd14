"""The result of a soak: slopes after the warm-up, waiting times, errors and goals, as data and as a table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bench.soak.figures import WARM_UP, Slope, after_warm_up, quantiles, slope, together
from bench.soak.score import Score
from bench.soak.server import ResourceUse

GOAL_MS = 50.0
KEPT_LINES = 20
MINUTE_S = 60.0
LIFE = 20  # samples after the warm-up of a child process that is followed


@dataclass
class Seen:
    """Everything that was measured so far."""

    minutes: float  # requested
    seed: int
    clients: int
    held: list[ResourceUse] = field(default_factory=list)
    unloaded: list[ResourceUse] = field(default_factory=list)  # with no model loaded, between two models
    took_ms: dict[str, list[float]] = field(default_factory=dict)
    recorded: tuple[int, int] = (0, 0)  # tokens in the database, and its bytes
    stopped: bool = False


def result(seen: Seen, score: Score, complaints: Sequence[str], finished: bool) -> dict[str, Any]:
    """Everything as plain data. `complaints`: what the server logged; each line of an error in it counts
    as an error."""
    slopes = slopes_of(seen.held, seen.unloaded)
    took = {path: quantiles(values) for path, values in seen.took_ms.items()}
    logged = [line for line in complaints if line.startswith("Traceback") or "ERROR" in line or "CRITICAL" in line]
    summary = score.summary()
    errors = score.errors + len(logged)
    tokens, size = seen.recorded
    goals = {
        "memory without a model does not grow": _still(slopes["unloaded_mb"]),
        "handles do not grow": _still(slopes["handles"]),
        "threads do not grow": _still(slopes["threads"]),
        "memory of child processes does not grow": _still(slopes["child_own_mb"]),
        "no error": errors == 0,
        **{f"p95 of {path} under {GOAL_MS:.0f} ms": of["p95"] < GOAL_MS for path, of in took.items() if of},
    }
    return {
        "finished": finished,
        "stopped": seen.stopped,
        "minutes_asked": seen.minutes,
        "minutes": round((seen.held[-1].seconds - seen.held[0].seconds) / 60, 2) if seen.held else 0.0,
        "seed": seen.seed,
        "clients": seen.clients,
        "warm_up_share": round(WARM_UP, 3),
        "cpus": os.cpu_count(),
        "slopes": {
            name: one and {"per_minute": round(one.per_minute, 4), "error": round(one.error, 4)}
            for name, one in slopes.items()
        },
        "took_ms": {
            path: {"n": len(seen.took_ms[path]), **{k: round(v, 2) for k, v in figures.items()}}
            for path, figures in took.items()
        },
        "tokens": tokens,
        "database_bytes": size,
        "database_bytes_per_1000_tokens": round(1000 * size / tokens) if tokens else None,
        **summary,
        "errors": errors,
        "logged_errors": logged[:KEPT_LINES],
        "logged_lines": len(complaints),
        "last_logged": list(complaints[-KEPT_LINES:]),
        "goals": goals,
        "course": course(seen.held),
        "unloaded": [
            {"minute": round(one.seconds / MINUTE_S, 2), "own_mb": round(one.server.own / 1e6, 1)}
            | {"handles": one.server.handles, "threads": one.server.threads, "children": len(one.children)}
            for one in seen.unloaded
        ],
    }


def slopes_of(held: Sequence[ResourceUse], unloaded: Sequence[ResourceUse]) -> dict[str, Slope | None]:
    """Growth a minute of the server process, and of its child processes' own memory.

    A model's memory depends on settings that change all the time (caches, kept key-value caches), so memory is judged
    by what the server has with no model loaded: the same state again and again. Settings start and end child
    processes, each with pipes and threads in the server, and models differ in size: of the other samples only those
    with the same model and equally many child processes are compared. A child process is followed over its own life,
    without its first third.
    """
    after = held[after_warm_up([one.seconds for one in held]) :]
    at, states = [one.seconds for one in after], [(one.model, len(one.children)) for one in after]
    numbers = {state: number for number, state in enumerate(dict.fromkeys(states))}
    alike = [numbers[state] for state in states]
    server: dict[str, list[float]] = {
        "own_mb": [one.server.own / 1e6 for one in after],
        "rss_mb": [one.server.rss / 1e6 for one in after],
        "handles": [float(one.server.handles) for one in after],
        "threads": [float(one.server.threads) for one in after],
    }
    lives: dict[int, tuple[list[float], list[float]]] = {}
    for one in held:
        for pid, use in one.children.items():
            seconds, own = lives.setdefault(pid, ([], []))
            seconds.append(one.seconds)
            own.append(use.own / 1e6)
    children = (
        slope(seconds[since:], own[since:])
        for seconds, own in lives.values()
        if (since := after_warm_up(seconds)) >= LIFE
    )
    between = unloaded[after_warm_up([one.seconds for one in unloaded]) :]
    return {
        "unloaded_mb": slope([one.seconds for one in between], [one.server.own / 1e6 for one in between]),
        **{name: slope(at, values, alike) for name, values in server.items()},
        "child_own_mb": together(one for one in children if one),
    }


def _still(found: Slope | None) -> bool | None:
    return None if found is None else not found.is_growth


def course(held: Sequence[ResourceUse]) -> list[dict[str, float]]:
    """Medians of all resources, minute by minute."""
    if not held:
        return []
    minutes: dict[int, list[ResourceUse]] = {}
    for one in held:
        minutes.setdefault(int((one.seconds - held[0].seconds) // MINUTE_S), []).append(one)
    return [
        {
            "minute": minute,
            "own_mb": round(median(o.server.own for o in of) / 1e6, 1),
            "rss_mb": round(median(o.server.rss for o in of) / 1e6, 1),
            "handles": median(o.server.handles for o in of),
            "threads": median(o.server.threads for o in of),
            "children": median(len(o.children) for o in of),
            "with_children_own_mb": round(median(o.together.own for o in of) / 1e6, 1),
            "with_children_handles": median(o.together.handles for o in of),
            "database_mb": round(median(o.database for o in of) / 1e6, 2),
        }
        for minute, of in minutes.items()
    ]


def table(found: dict[str, Any]) -> str:
    """The result as short text."""
    units = {
        "unloaded_mb": "MB, the server's own memory without files, with no model loaded",
        "own_mb": "MB, the same with a model, which settings enlarge",
        "rss_mb": "MB, resident in the server (RSS)",
        "handles": "open handles of the server",
        "threads": "threads of the server",
        "child_own_mb": "MB, own memory of a child process",
    }
    lines = [
        f"{found['minutes']:g} minutes, {found['clients']} clients, seed {found['seed']}, {found['tokens']} "
        f"tokens, {found['cpus']} CPU cores",
        "",
        "growth a minute after the first third; with a model: the same one and as many child processes",
    ]
    for name, unit in units.items():
        one = found["slopes"][name]
        figure = "too short to tell" if one is None else f"{one['per_minute']:+.3f} ± {one['error']:.3f}"
        lines.append(f"  {figure:<22} {unit}")
    lines += ["", f"{'milliseconds':<16}{'n':>7}{'p50':>9}{'p95':>9}{'max':>9}"]
    for path, took in found["took_ms"].items():
        figures = (f"{took.get(name, 0):>9.1f}" for name in ("p50", "p95", "max"))
        lines.append(f"{path:<16}{took['n']:>7}" + "".join(figures))
    each = found["database_bytes_per_1000_tokens"]
    lines += ["", f"database: {each / 1e6:.2f} MB per 1000 tokens" if each else "database: no token recorded"]
    for what in ("done", "refused"):
        lines.append(f"{what}: " + (", ".join(f"{name} {count}" for name, count in found[what].items()) or "nothing"))
    lines.append(f"errors: {found['errors']}")
    lines += [f"  {text}" for text in [*found["first_errors"], *found["logged_errors"]][:10]]
    lines += [
        "",
        *(
            f"{'kept' if kept else 'too short to tell' if kept is None else 'MISSED'}: {goal}"
            for goal, kept in found["goals"].items()
        ),
    ]
    return "\n".join(lines)
