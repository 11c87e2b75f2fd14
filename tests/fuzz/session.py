"""A run of many mutants that says how it goes, and keeps what it finds as seed files."""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tests.fuzz.mutant import Mutant, Verdict
from tests.fuzz.runner import Asked, run_all

SEEDS = Path(__file__).resolve().parent / "seeds"
SAY_S = 10.0


def keep(mutant: Mutant, verdict: Verdict, folder: Path = SEEDS) -> Path:
    """Write a mutant as a seed file, named by what it is; the default suite replays it from then on."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = mutant.plain()
    name = hashlib.sha256(json.dumps([plain["sample"], plain["changes"]], sort_keys=True).encode()).hexdigest()[:10]
    path = folder / f"{mutant.kind}-{name}.json"
    found = {"outcome": verdict.outcome, "detail": verdict.detail[:300], "where": verdict.where}
    path.write_text(json.dumps({"mutant": plain, "found": found}, indent=1) + "\n", encoding="utf-8")
    return path


def kept(folder: Path = SEEDS) -> list[tuple[Path, Mutant]]:
    """Every seed file and its mutant."""
    return [
        (path, Mutant.of(json.loads(path.read_text(encoding="utf-8"))["mutant"]))
        for path in sorted(folder.glob("*.json"))
    ]


def go_through(
    asked: Iterable[Asked], workers: int, hang_s: float, minutes: float = float("inf"), folder: Path | None = SEEDS
) -> Counter[tuple[str, str]]:
    """How many mutants of each kind came to each outcome, until there are no more, time is up or Ctrl-C. The first of
    every cause is told, and kept in `folder`."""
    counts, causes = Counter[tuple[str, str]](), set[str]()
    began_s = said_s = time.monotonic()
    results = run_all(asked, workers, hang_s)
    try:
        for mutant, verdict in results:
            counts[mutant.kind, verdict.outcome] += 1
            cause = f"{mutant.kind} {verdict.outcome} {verdict.where or verdict.detail[:60]}"
            if not verdict.good and cause not in causes:  # the others say nothing new
                causes.add(cause)
                path = keep(mutant, verdict, folder) if folder is not None else "not kept"
                print(
                    f"FOUND {verdict.outcome}: {mutant}\n  {verdict.detail[:300]}\n  {verdict.where}\n  {path}",
                    flush=True,
                )
            now_s = time.monotonic()
            if now_s - said_s > SAY_S:
                print(f"{counts.total():6,} mutants in {(now_s - began_s) / 60:.1f} min", flush=True)
                said_s = now_s
            if now_s - began_s > 60 * minutes:
                break
    except KeyboardInterrupt:
        print("\nStopped.")
    finally:
        results.close()
    return counts
