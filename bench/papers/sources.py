"""Where answers come from: orderings that a bench computes, rows of evaluations, systems, figures read off a result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.harness.report import verdict
from bench.papers.parts import BY_CLAIM, HOLDS, NEVER, NO, OPEN, PART, Answer, Results, Source

LOWER = ("kl", "perplexity", "tpot_ms", "ttft_ms", "stall_ms", "link_bytes")  # figures of which less is better
SHARES = ("hit_rate", "recall_at_k", "recall", "exact_match", "unseen_match", "agreement")
TIMED = ("tok_s", "tpot_ms", "ttft_ms", "stall_ms")  # figures that other programs on the machine change
BUSY = 0.3  # CPU cores of other programs from which on times are not compared (core.measure.evaluate.others)
NOTHING = "No result has it yet."
OPTIONS = {"lossy": " --questions 48 --tokens 256"}  # with which a bench answers
LOSSY, SYSTEMS = f"bench lossy{OPTIONS['lossy']}", "bench systems"
QUIET = f"{NOTHING} Times ask for a machine that does nothing else."


def shown(figure: str, value: float | None) -> str:
    """A figure with its unit, short."""
    if value is None:
        return "-"
    if figure in SHARES:
        return f"{100 * value:.1f} %"
    if figure == "link_bytes":
        return f"{value / 1e6:.2f} MB"
    return f"{value:.1f} ms" if figure.endswith("_ms") else f"{value:.3g}"


def whose(result: Mapping[str, Any]) -> str:
    """The beginning of an answer that names a model other than the demo model."""
    model = Path(str(result.get("model", "demo"))).name
    return "" if model == "demo" else f"{model}: "


def together(verdicts: Sequence[str]) -> str:
    """One verdict for several: those that are open count only where all are."""
    known = [one for one in verdicts if one != OPEN]
    if not known:
        return OPEN
    return HOLDS if set(known) == {HOLDS} else NO if set(known) == {NO} else PART


def of(holds: Sequence[bool]) -> str:
    """The verdict on comparisons."""
    return HOLDS if all(holds) else PART if any(holds) else NO


@dataclass(frozen=True, slots=True)
class OfBench:
    """What reads results of one bench."""

    bench: str

    @property
    def command(self) -> str:
        return f"bench {self.bench}{OPTIONS.get(self.bench, '')}"


@dataclass(frozen=True, slots=True)
class Claims(OfBench):
    """An ordering that a bench computed and stored, in some figures; `names` of what is compared."""

    claim: str
    names: tuple[str, ...] = ()

    def answer(self, results: Results) -> Answer:
        for file, result in results.newest(self.bench):
            if found := [one for one in result.get("orderings", ()) if one["claim"] == self.claim]:
                verdicts = [BY_CLAIM[one["holds"]] for one in found]
                texts = [
                    f"{self._compared(one)}: {BY_CLAIM[one['holds']]} ({_values(one, 'pairs', 'values')})"
                    + (
                        f", with searches waited for, a bound: {BY_CLAIM[one['holds_waited_for']]} "
                        f"({_values(one, 'pairs_waited_for')})"
                        if "holds_waited_for" in one
                        else ""
                    )
                    for one in found
                ]
                return Answer(together(verdicts), f"{whose(result)}{'; '.join(texts)}.", result["date"], file)
        return Answer(OPEN, NOTHING)

    def _compared(self, one: Mapping[str, Any]) -> str:
        what = " above ".join(self.names[:2]) or one["claim"].partition(": ")[2] or one["claim"]
        return f"{what}, {one['figure'].replace('_', ' ')}" if "figure" in one else what


def _values(one: Mapping[str, Any], *keys: str) -> str:
    """The values compared, best first as claimed: by size, or a list of rows."""
    rows: Any = next((one[key] for key in keys if key in one), {})
    named = rows.items() if isinstance(rows, Mapping) else [("", row) for row in rows]
    figure = one.get("figure", "")
    return ", ".join(f"{at} {' / '.join(shown(figure, value) for value in values)}".strip() for at, values in named)


@dataclass(frozen=True, slots=True)
class Modes:
    """Orderings of modes of an evaluation, (better, worse), in a figure; of the newest evaluation that has them all, at
    `residency`, or at every one that it has. Times measured while other programs ran are shown, and not compared."""

    pairs: tuple[tuple[str, str], ...]
    figure: str = "exact_match"
    residency: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)  # of modes, where they have others than here
    command: str = LOSSY

    def answer(self, results: Results) -> Answer:
        wanted = list(dict.fromkeys(mode for pair in self.pairs for mode in pair))
        disturbed: Answer | None = None
        for file, result in evaluations(results):
            rows = {(row["residency"], row["mode"]): row for row in result["rows"] if not row["problem"]}
            shares = [
                share
                for share in dict.fromkeys(share for share, _ in rows)
                if self.residency in (None, share) and all((share, mode) in rows for mode in wanted)
            ]
            if not shares:
                continue
            used = [rows[share, mode] for share in shares for mode in wanted]
            text = f"{whose(result)}{self._values(rows, shares, wanted)}{_error(self.figure, used)}"
            busy = max(row["others_cores"] or 0.0 for row in used)
            if self.figure in TIMED and busy > BUSY:
                note = f"other programs used up to {busy:.1f} CPU cores, so that no ordering of times is read off it"
                disturbed = disturbed or Answer(OPEN, f"{text}; {note}.", result["date"], file)
                continue
            holds = [
                verdict([[rows[share, mode][self.figure] for mode in pair]], lower=self.figure in LOWER)
                for share in shares
                for pair in self.pairs
            ]
            answers = f"{sum(one == 'yes' for one in holds)} of {len(holds)} orderings hold"
            return Answer(together([BY_CLAIM[one] for one in holds]), f"{text}; {answers}.", result["date"], file)
        return disturbed or Answer(OPEN, NOTHING)

    def _values(
        self, rows: Mapping[tuple[float, str], Mapping[str, Any]], shares: Sequence[float], modes: Sequence[str]
    ) -> str:
        return f"{_title(self.figure)} " + "; ".join(
            f"at {share:g} "
            + ", ".join(
                f"{self.names.get(mode, mode.replace('_', ' '))} {shown(self.figure, rows[share, mode][self.figure])}"
                for mode in modes
            )
            for share in shares
        )


def _error(figure: str, rows: Sequence[Mapping[str, Any]]) -> str:
    errors = [row[f"{figure}_se"] for row in rows if row.get(f"{figure}_se") is not None]
    return f" (standard error up to {100 * max(errors):.0f} points)" if errors else ""


def evaluations(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Results with rows of modes, newest first: those of `eval`, and of the bench that runs every mode."""
    found = [one for bench in ("eval", "lossy") for one in results.newest(bench)]
    return sorted(found, key=lambda one: str(one[1]["date"]), reverse=True)


@dataclass(frozen=True, slots=True)
class Keeps:
    """Whether a mode answers as well as another one, to two standard errors of its exact match, at every residency of
    the newest evaluation that has both."""

    mode: str
    base: str
    command: str = LOSSY

    def answer(self, results: Results) -> Answer:
        for file, result in evaluations(results):
            rows = {(row["residency"], row["mode"]): row for row in result["rows"] if not row["problem"]}
            pairs = [
                (share, row, rows[share, self.base])
                for (share, mode), row in rows.items()
                if mode == self.mode and (share, self.base) in rows and row["exact_match"] is not None
            ]
            if pairs:
                holds = [
                    base["exact_match"] - row["exact_match"] <= 2 * row["exact_match_se"] for _, row, base in pairs
                ]
                text = "; ".join(
                    f"at {share:g} {row['exact_match']:.1%} +- {row['exact_match_se']:.1%}, {self.base} "
                    f"{base['exact_match']:.1%}"
                    for share, row, base in pairs
                )
                answers = of(holds)
                text = f"{whose(result)}Exact match: {text}; kept is what is within two errors."
                return Answer(answers, text, result["date"], file)
        return Answer(OPEN, NOTHING)


def _title(figure: str) -> str:
    return {"link_bytes": "Copied a token:", "tok_s": "Tokens a second:", "kl": "KL:"}.get(
        figure, figure.replace("_", " ").capitalize() + ":"
    )


@dataclass(frozen=True, slots=True)
class Systems:
    """One preset against others in a figure of `bench systems`, at every budget, in the newest result of each model;
    times measured while other programs ran are left out."""

    better: str
    worse: tuple[str, ...]
    figure: str = "tpot_ms"
    command: str = SYSTEMS

    def answer(self, results: Results) -> Answer:
        names = (self.better, *self.worse)
        used = of_each_model(results, names, timed=self.figure in TIMED)
        if not used:
            return Answer(OPEN, QUIET)
        texts, holds = [], list[str]()
        for _, result in used.values():
            table = {
                budget: {name: result["systems"][name][budget].get(self.figure) for name in names}
                for budget in result["budgets"]
            }
            pairs = [[row[self.better], row[other]] for row in table.values() for other in self.worse]
            holds += [BY_CLAIM[verdict([pair], lower=self.figure in LOWER)] for pair in pairs]
            rows = "; ".join(
                f"at {budget} " + ", ".join(f"{name} {shown(self.figure, value)}" for name, value in row.items())
                for budget, row in table.items()
            )
            texts.append(f"{result['model']}: {_title(self.figure)} {rows}.")
        date = min(str(result["date"]) for _, result in used.values())
        return Answer(together(holds), " ".join(texts), date, ", ".join(file for file, _ in used.values()))


def of_each_model(
    results: Results, names: Sequence[str] = (), *, timed: bool = True
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Model -> (file, its newest result of `bench systems` that has these systems); `timed`: none that was measured
    while other programs ran."""
    used: dict[str, tuple[str, dict[str, Any]]] = {}
    for file, result in results.newest("systems"):
        disturbed = timed and (result.get("others_cores") or 0.0) > BUSY
        if not disturbed and all(name in result["systems"] for name in names):
            used.setdefault(str(result["model"]), (file, result))
    return used


@dataclass(frozen=True, slots=True)
class SystemsReading:
    """What `read` makes of times in the newest result of `bench systems` of each model: (verdict, text), None where
    that result lacks it."""

    read: Callable[[Mapping[str, Any]], tuple[str, str] | None]
    command: str = SYSTEMS

    def answer(self, results: Results) -> Answer:
        found = [(file, one, self.read(one)) for file, one in of_each_model(results).values()]
        return _joined([(file, one, answer) for file, one, answer in found if answer is not None], QUIET)


@dataclass(frozen=True, slots=True)
class Reading(OfBench):
    """What `read` makes of the newest result of a bench: (verdict, text), None where that result lacks it."""

    read: Callable[[Mapping[str, Any]], tuple[str, str] | None]

    def answer(self, results: Results) -> Answer:
        for file, result in results.newest(self.bench):
            if (found := self.read(result)) is not None:
                return Answer(found[0], whose(result) + found[1], result["date"], file)
        return Answer(OPEN, NOTHING)


@dataclass(frozen=True, slots=True)
class Readings(Reading):
    """The same of the newest result of each model."""

    def answer(self, results: Results) -> Answer:
        answers: dict[str, tuple[str, Mapping[str, Any], tuple[str, str]]] = {}
        for file, result in results.newest(self.bench):
            if (found := self.read(result)) is not None:
                answers.setdefault(str(result["model"]), (file, result, found))
        return _joined([*answers.values()], NOTHING)


def _joined(answers: Sequence[tuple[str, Mapping[str, Any], tuple[str, str]]], nothing: str) -> Answer:
    """One answer of several (file, result, (verdict, text))."""
    if not answers:
        return Answer(OPEN, nothing)
    text = " ".join(f"{Path(str(one['model'])).name}: {answer[1]}" for _, one, answer in answers)
    date = min(str(one["date"]) for _, one, _ in answers)
    return Answer(together([answer[0] for *_, answer in answers]), text, date, ", ".join(file for file, *_ in answers))


@dataclass(frozen=True, slots=True)
class First:
    """The first of several sources that has an answer."""

    sources: tuple[Source, ...]

    @property
    def command(self) -> str:
        return self.sources[0].command

    def answer(self, results: Results) -> Answer:
        found = [source.answer(results) for source in self.sources]
        return next((one for one in found if one.verdict != OPEN), found[0])


@dataclass(frozen=True, slots=True)
class Stated:
    """A verdict with its reason, read from no file: not askable here, or from arithmetic alone."""

    verdict: str
    text: str
    command: str = ""

    def answer(self, results: Results) -> Answer:
        return Answer(self.verdict, self.text)


def never(reason: str) -> Stated:
    """Not askable here, and why."""
    return Stated(NEVER, reason)


DRAWING = never("Drawings of how it works: they hold no measurement.")
