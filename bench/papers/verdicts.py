"""The one evaluator of rows: which of the five answers the results give, with the noise of each difference.

A comparison holds where its whole interval is on the claimed side (`bench.harness.paired`; the confidence is that of
all comparisons of a row together), speaks against the claim where it is on the other side, and is not told apart where
it has the border inside. A row holds where all comparisons do, in part where some do, does not where some speak against
it and none for it, and is not told apart otherwise. A correlation is a comparison with 0 and with STRONG."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

from bench.harness.paired import Difference, difference
from bench.models.sizes import is_generated
from bench.papers.parts import HOLDS, NEVER, NO, PART, UNTOLD, Answer, Ask, Row

STRONG = 0.5  # of a correlation: a quarter of one side's variance is the other's
# Figures of which less is better, or is claimed.
LOWER = (*"kl tpot_ms ttft_ms simulated_ms link_bytes entropy share_of_token change lost list_share".split(),)
SHARES = (*"hit_rate recall match accuracy precision share share_of_token change lost list_share".split(),)
BUSY = 0.3  # CPU cores of other programs from which on times are not compared (core.measure.evaluate.others)
Blocks = Mapping[str, Mapping[str, list[float]]]
"""Group -> subject -> blocks."""


class Results(Protocol):
    """Where answers are looked up."""

    def newest(self, bench: str) -> list[tuple[str, dict[str, Any]]]:
        """(file name, result) of a bench, newest first."""


@dataclass(frozen=True, slots=True)
class Used:
    """The result of a model that answers; `blocks` is empty where it holds only means."""

    file: str
    result: Mapping[str, Any]
    blocks: Blocks

    @property
    def model(self) -> str:
        return Path(str(self.result.get("model", "demo"))).name

    @property
    def trained(self) -> bool:
        return not is_generated(self.model)


def answer(row: Row, results: Results) -> Answer:
    """The answer of a row, from the newest result of each model."""
    if not isinstance(ask := row.source, Ask):
        return Answer(ask.verdict, ask.text)
    used = of_each_model(ask, results)
    asked = [one for one in used if not why_not(ask, one)]
    reasons = [f"{one.model}: {why}" for one in used if (why := why_not(ask, one))]
    if not used:
        return Answer(NEVER, "No result has it yet.", unmeasured=True)
    texts, signs, old = list[str](), list[int](), list[str]()
    comparisons = sum(len([*_pairs(ask, one)]) for one in asked)
    for one in asked:
        text, found = _compared(ask, one, comparisons)
        texts, signs = [*texts, text], [*signs, *found]
        old += [f"{one.model}: {why}" for why in stale(row, one)]
    verdict = judged(signs) if asked else NEVER
    files = tuple(one.file for one in used)
    date = min(str(one.result["date"]) for one in used)
    note = [f"Not asked: {'; '.join(reasons)}."] if reasons else []
    return Answer(
        verdict,
        " ".join([*texts, *note, *([ask.controls] if ask.controls else [])]),
        files,
        date,
        "; ".join(old),
        bool(asked) and not signs,
    )


def judged(signs: Sequence[int]) -> str:
    """The answer of comparisons: 1 = as claimed, -1 = against it, 0 = not told apart."""
    if signs and all(one > 0 for one in signs):
        return HOLDS
    return PART if any(one > 0 for one in signs) else NO if any(one < 0 for one in signs) else UNTOLD


def of_each_model(ask: Ask, results: Results) -> list[Used]:
    """Of each model the newest result with blocks, or else its newest one; times of a busy machine are left out."""
    found: dict[str, Used] = {}
    every = [one for bench in ask.bench.split() for one in results.newest(bench)]
    for file, result in sorted(every, key=lambda one: str(one[1]["date"]), reverse=True):
        if ask.budget and result.get("budget") != ask.budget:
            continue
        if ask.timed and (result.get("others_cores") or 0.0) > BUSY:
            continue
        used = Used(file, result, blocks_of(result, ask.blocks))
        used = used if any(True for _ in _pairs(ask, used)) else Used(file, result, {})
        if used.model not in found or (used.blocks and not found[used.model].blocks):
            found[used.model] = used
    return list(found.values())


def why_not(ask: Ask, used: Used) -> str:
    """Why a model is not asked, "" = it is."""
    if ask.learned and not used.trained:
        return "random weights say nothing about what routers have learnt"
    ratios = copies_over_compute(used.result)
    if ask.copies and ratios and max(ratios.values()) < ask.copies:
        return (
            f"copying takes {max(ratios.values()):.2g} of computing a layer here, and the claim is about at least "
            f"{ask.copies:g}"
        )
    return ""


def stale(row: Row, used: Used) -> Iterator[str]:
    """Why a result is no longer the engine's."""
    from core.engine.manifest import versions  # it needs torch, and the help of `papers` does not

    if (
        isinstance(row.source, Ask)
        and row.source.timed
        and used.result.get("versions", {}).get("arithmetic") != versions()["arithmetic"]
    ):
        yield "timed with an earlier arithmetic"
    for one in row.before(str(used.result["date"])):
        yield f"before {one.what}"


def copies_over_compute(result: Mapping[str, Any]) -> dict[str, float]:
    """Copying a token's experts of a layer over computing that layer, by what it was measured for; {} = unknown."""
    if (tpot := result.get("speculating", {}).get("tpot")) is not None:
        of = {at: row["systems"]["on demand"] for at, row in tpot.items()}
        return {at: one["copy_ms"] / one["compute_ms"] for at, one in of.items()}
    k, layers = result.get("top_k"), result.get("layers")
    if k is None or layers is None:
        return {}
    if "links" in result:
        layer_ms = result["resident_ms"]["whole"] / layers
        return {name: k * link["load_ms"] / layer_ms for name, link in result["links"].items()}
    if result.get("link_gbps") and "expert_bytes" in result and result.get("resident", {}).get("tpot_ms"):
        layer_ms = result["resident"]["tpot_ms"] / layers
        return {"": k * result["expert_bytes"] / result["link_gbps"] / 1e6 / layer_ms}
    return {}


def blocks_of(result: Mapping[str, Any], where: str) -> Blocks:
    """The lists of numbers at `where` of a result, by group and subject. Rows of an evaluation are taken by mode and
    residency."""
    found: dict[str, dict[str, list[float]]] = {}

    def walk(node: Any, keys: Sequence[str], at: str, subject: str) -> None:
        if isinstance(node, list) and node and isinstance(node[0], Mapping) and "mode" in node[0]:
            node = _by_mode(node)
        if not keys:
            if isinstance(node, list) and node and all(isinstance(one, (int, float)) for one in node):
                found.setdefault(at, {})[subject] = [float(one) for one in node]
            return
        if not isinstance(node, Mapping):
            return
        key, *rest = keys
        for name in node if key in ("{}", "{at}") else [key] if key in node else []:
            walk(node[name], rest, name if key == "{at}" else at, name if key == "{}" else subject)

    walk(result, where.split("/"), "", "")
    return found


def _by_mode(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        found.setdefault(row["mode"], {})[f"{row['residency']:g}"] = row
    return found


def _pairs(ask: Ask, used: Used) -> Iterator[tuple[str, str, str | float]]:
    """(group, subject, what it is compared with) of every comparison that a result has blocks of."""
    for at, of in used.blocks.items():
        if not ask.at or at in ask.at:
            for better, than in ask.pairs:
                if better in of and (isinstance(than, (int, float)) or than in of):
                    yield at, better, than


def _compared(ask: Ask, used: Used, comparisons: int) -> tuple[str, list[int]]:
    """What a model's comparisons say as text, and the sign of each."""
    who = f"{used.model} ({'trained' if used.trained else 'random'} weights"
    if ratios := copies_over_compute(used.result):
        shown = [f"{name} {one:.2g}".strip() for name, one in ratios.items()]
        who += f", copy/compute {', '.join(shown)}"
    texts, signs, n = list[str](), list[int](), 0
    for at, better, than in _pairs(ask, used):
        of = used.blocks[at]
        one = difference(of[better], than if isinstance(than, (int, float)) else of[than], comparisons)
        signs.append(0 if one is None else _sign(one, ask))
        n = max(n, len(of[better]))
        texts.append(_one(ask, at, better, than, of, one))
    if not signs:
        return f"{who}): no paired data in `{used.file}`.", []
    counts = [
        (sum(one == sign for one in signs), what)
        for sign, what in ((1, "hold"), (-1, "against"), (0, "not told apart"))
    ]
    summary = ", ".join(f"{count} {what}" for count, what in counts if count)
    there = {(better, than) for _, better, than in _pairs(ask, used)}
    lacks = "; ".join(f"{better} / {than}" for better, than in ask.pairs if (better, than) not in there)
    return f"{who}, n = {n} blocks; {summary}): {'; '.join(texts)}.{f' Not in it: {lacks}.' if lacks else ''}", signs


def _sign(one: Difference, ask: Ask) -> int:
    low, high = (-one.high, -one.low) if ask.figure in LOWER else (one.low, one.high)
    return 1 if low > -ask.margin else -1 if high < -ask.margin else 0


def _one(
    ask: Ask, at: str, better: str, than: str | float, of: Mapping[str, list[float]], one: Difference | None
) -> str:
    other = (
        shown(ask.figure, than)
        if isinstance(than, (int, float))
        else f"{than} {shown(ask.figure, fmean(of[than]))}".strip()
    )
    noise = (
        "fewer than 3 blocks" if one is None else f"{shown(ask.figure, one.mean, '+')} ± {shown(ask.figure, one.half)}"
    )
    named = f"{better} {shown(ask.figure, fmean(of[better]))}".strip()
    return f"{f'{at}: ' if at else ''}{named} / {other} ({noise})"


def shown(figure: str, value: float, sign: str = "") -> str:
    """A figure with its unit, short."""
    if figure in SHARES:
        return f"{100 * value:{sign}.1f} %"
    if figure == "link_bytes":
        return f"{value / 1e6:{sign}.2f} MB"
    return f"{value:{sign}.2f} ms" if figure.endswith("_ms") else f"{value:{sign}.3g}"
