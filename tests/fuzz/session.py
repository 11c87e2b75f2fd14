"""A run of many mutants that says how it goes, and keeps what it finds as seed files."""

import hashlib
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tests.fuzz.kinds import WEIGHTS
from tests.fuzz.mutant import GOOD, Mutant, Verdict
from tests.fuzz.runner import Asked, Verdicts, run_all

SEEDS = Path(__file__).resolve().parent / "seeds"
SAY_S = 10.0
Run = Callable[[Iterable[Asked], int, float], Verdicts]


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


class Session:
    """Counts outcomes; prints a line now and then, each finding, and a summary at the end, also after Ctrl-C."""

    def __init__(
        self,
        kinds: Sequence[str],
        workers: int,
        hang_s: float,
        *,
        keep: bool = True,
        folder: Path = SEEDS,
        run: Run = run_all,
        say: Callable[[str], None] = lambda text: print(text, flush=True),
    ) -> None:
        self._kinds, self._workers, self._hang_s, self._keep = list(kinds), workers, hang_s, keep
        self._folder, self._run, self._say = folder, run, say
        self.first = random.SystemRandom().randrange(10**9)
        self.counts: Counter[str] = Counter()
        self.by_kind: Counter[tuple[str, str]] = Counter()
        self.found: dict[str, Path | None] = {}

    def run(self, asked: Iterable[Asked] | None = None, minutes: float | None = None) -> int:
        """`asked`, or fresh mutants for so many minutes. 0 when nothing was found, else 1."""
        said_s = began_s = time.monotonic()
        end_s = began_s + 60 * minutes if minutes is not None else float("inf")
        results = self._run(asked if asked is not None else self._endless(), self._workers, self._hang_s)
        try:
            for mutant, verdict in results:
                self._take(mutant, verdict)
                now_s = time.monotonic()
                if now_s - said_s > SAY_S:
                    self._say(self._line(now_s - began_s))
                    said_s = now_s
                if now_s > end_s:
                    break
        except KeyboardInterrupt:
            self._say("\nStopped.")
        finally:
            results.close()
        self._summary(time.monotonic() - began_s)
        return 1 if self.found else 0

    def _endless(self) -> Iterator[Asked]:
        """Fresh seeds for ever; some kinds have more to be found than others."""
        rng, weights = random.Random(self.first), [WEIGHTS.get(kind, 1) for kind in self._kinds]
        seed = self.first
        while True:
            yield {"kind": rng.choices(self._kinds, weights)[0], "seed": seed}
            seed += 1

    def _take(self, mutant: Mutant, verdict: Verdict) -> None:
        self.counts[verdict.outcome] += 1
        self.by_kind[mutant.kind, verdict.outcome] += 1
        if verdict.good:
            return
        cause = f"{mutant.kind} {verdict.outcome} {verdict.where or verdict.detail[:60]}"
        if cause not in self.found:  # one seed a cause: the others say nothing new
            self.found[cause] = keep(mutant, verdict, self._folder) if self._keep else None
            self._say(f"FOUND {verdict.outcome}: {mutant}\n      {verdict.detail[:300]}\n      {verdict.where}")

    def _line(self, elapsed_s: float) -> str:
        done = self.counts.total()
        rest = ", ".join(f"{self.counts[name]} {name}" for name in self.counts)
        return f"{done:6,} mutants in {elapsed_s / 60:.1f} min ({done / elapsed_s:.1f}/s): {rest}"

    def _summary(self, elapsed_s: float) -> None:
        self._say(self._line(max(elapsed_s, 1e-9)))
        for kind in dict.fromkeys(kind for kind, _ in self.by_kind):
            told = ", ".join(f"{n} {outcome}" for (of, outcome), n in self.by_kind.items() if of == kind)
            self._say(f"  {kind}: {told}")
        bad = sum(n for outcome, n in self.counts.items() if outcome not in GOOD)
        self._say(
            f"Nothing found; the seeds began with {self.first}."
            if not bad
            else f"{bad} to be mended, of {len(self.found)} causes: "
            f"{', '.join(path.name for path in self.found.values() if path) or 'not kept'}"
        )
