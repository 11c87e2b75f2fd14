"""bench speculation: guessed tokens that a pass verifies, against one token a pass, and against fixed numbers of them.

What is written is given, so that a text repeats or does not whatever the model would say: passages of the bundled texts
again and again (`repeated`), with every twelfth token another (`edited`), texts in their order (`held out`), and what
the model writes by itself at temperature 1 (`own`). The prompt is the first passage. Every kind writes the same text,
from a cache as after the load; bits are compared as well. The model "demo-head" is the demo with a head that is trained
before (bench.models.head); its guesses, and both together, are two kinds more. The machine's own link copies from host
memory; the emulated one takes as many layers for an expert as the reference machine's does."""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import islice, product
from statistics import fmean, median
from typing import Any

import torch

from bench.harness.engines import emulated_link, model_of, token_stream
from bench.harness.figures import spread
from bench.harness.paired import times
from bench.harness.report import interval
from bench.harness.resume import KeptRows
from bench.harness.run import Result, Run, Suite
from bench.models.head import TOGETHER, with_head
from core.engine import Engine
from core.engine.draft_gate import DraftGate
from core.engine.draft_prefetch import DraftPrefetch
from core.engine.drafter import HEAD_SLOPE, Drafter
from core.errors import MoestroError
from core.settings.sampling import Sampling
from core.system.wording import grid
from core.types import Ids, StepRecord

PASSAGE, EDITED = 48, 12  # tokens
SKIPPED = 2  # decoded passes that are not counted
LINKS = "own", "emulated"
TEXTS = ("repeated", "edited", "held out", "own")
FIXED = (1, 2, 4, 8)
LEAST = 1 + (SKIPPED + 1) * (1 + max(FIXED))  # tokens of a text
KINDS = ("off", "lookup", *map(str, FIXED))
HEADS = ("mtp", "auto")  # kinds of a model with a head
WITH_HEAD = "demo-head"
FASTER, NEVER_BELOW = 1.3, 0.97  # goals: where the text repeats and half or less is resident, and everywhere
HALF = 0.5


def measure(run: Run, model: str = "demo", budgets: str = "25%,50%,100%", rounds: int = 3, tokens: int = 96) -> Result:
    """`tokens` = written after each prompt. A run that breaks off goes on after the last cell, if its folder stays."""
    if tokens < LEAST:
        raise MoestroError(f"{tokens} tokens are too few for passes over {1 + max(FIXED)}. Choose {LEAST} or more.")
    head = model == WITH_HEAD
    asked = {"model": model, "rounds": rounds, "tokens": tokens, "small": run.small}
    kept = KeptRows(run.folder() / "speculation.jsonl", asked)
    path, kinds = model_of(run, model), (*KINDS, *HEADS) if head else KINDS
    if head:
        few = {"texts": TOGETHER, "steps": 2} if run.small else {}
        path = str(with_head(run.folder(), "demo", run.say, **few))
    for budget in budgets.split(","):
        settings = {"budget": budget, "link": "own", "drafts": "auto" if head else "off"}  # a head is loaded for these
        cells = [cell for cell in product(LINKS, TEXTS) if _row(kept, budget, *cell) is None]
        if cells:
            with run.loaded(path, settings, endless=True, arithmetic="fast", context=512) as engine:
                _measure_cells(run, engine, kept, cells, kinds, budget, rounds, tokens)
    found = [_row(kept, *cell) for cell in product(budgets.split(","), LINKS, TEXTS)]
    kept.done()
    return {"rows": found, "goals": [FASTER, NEVER_BELOW], "prompt": PASSAGE}


def _row(kept: KeptRows, budget: str, link: str, text: str) -> Result | None:
    """A cell that was measured before."""
    wanted = budget, link, text
    return next((row for row in kept.rows if (row["budget"], row["link"], row["text"]) == wanted), None)


def _measure_cells(
    run: Run,
    engine: Engine,
    kept: KeptRows,
    cells: Sequence[tuple[str, str]],
    kinds: Sequence[str],
    budget: str,
    rounds: int,
    tokens: int,
) -> None:
    texts = _texts(engine, rounds + 1, tokens)
    layer_ms = kept.note(
        f"layer_ms {budget}", lambda: Answer(engine, "off", Gates(), texts["held out"][0]).ms / engine.shape.layers
    )
    links = {"own": {"link": "own"}, "emulated": emulated_link(layer_ms, engine.sizes.blob)}
    for link, text in cells:
        engine.change(links[link])
        gates = {kind: Gates() for kind in kinds}  # each learns from its own passes alone

        def answered(
            kind: str, number: int, of: list[list[int]] = texts[text], gates: dict[str, Gates] = gates
        ) -> Answer:
            return Answer(engine, kind, gates[kind], of[number])

        of = run.by_turns(kinds, answered, rounds, what=f"{budget}, {link} link, {text}")
        about = {
            "budget": budget,
            "resident": engine.expert_cache.slots / (engine.shape.layers * engine.shape.experts),
            **links[link],
            "text": text,
        }
        kept.add({**about, **_figures(of)})


def _texts(engine: Engine, count: int, tokens: int) -> dict[str, list[list[int]]]:
    """`count` texts of each kind: prompts of PASSAGE tokens, and what is written after them."""
    stream, found = token_stream(engine), dict[str, list[list[int]]]({name: [] for name in TEXTS})
    for _ in range(count):
        text = list(islice(stream, PASSAGE + tokens))
        passage = text[:PASSAGE]
        whole = (passage * (1 + len(text) // PASSAGE))[: len(text)]
        edited = [text[-1 - at] if at > PASSAGE and not at % EDITED else token for at, token in enumerate(whole)]
        own = [*passage, *_written(engine, passage, tokens, len(found["own"]))]
        for name, one in zip(TEXTS, (whole, edited, text, own), strict=True):
            found[name].append(one)
    return found


def _written(engine: Engine, passage: list[int], tokens: int, seed: int) -> Iterator[int]:
    """What the model writes after a passage."""
    for piece in engine.generate(Ids(passage), Sampling(temperature=1.0, seed=seed, max_new_tokens=tokens)):
        if piece.token is not None:
            yield piece.token


class Gates:
    """What has been learnt of guesses out of the text, of the head's, and of fetching what they need."""

    def __init__(self) -> None:
        self.lookup, self.head = DraftGate(), DraftGate(HEAD_SLOPE)
        self.prefetch: DraftPrefetch | None = None

    def use(self, drafter: Drafter) -> None:
        """Have the engine guess by these."""
        if self.prefetch is None and drafter.prefetch is not None:
            self.prefetch = copy(drafter.prefetch)
            self.prefetch.restart()
        drafter.gate, drafter.head_gate, drafter.prefetch = self.lookup, self.head, self.prefetch


class Answer:
    """One text, written: the records of the passes that count, and the logits of all tokens."""

    def __init__(self, engine: Engine, kind: str, gates: Gates, text: list[int]) -> None:
        drafter = engine.parts.drafter
        engine.change({"drafts": "lookup" if kind.isdigit() else kind})
        gates.lookup.fixed = int(kind) if kind.isdigit() else None
        gates.use(drafter)
        engine.expert_cache.start_over()
        self.logits, steps = list[torch.Tensor](), list[StepRecord]()

        def draw(ids: Any, row: torch.Tensor) -> int:
            self.logits.append(row[0].clone())
            return text[len(ids)]

        sampling = Sampling(max_new_tokens=len(text) - PASSAGE)
        for piece in engine.generate(Ids(text[:PASSAGE]), sampling, draw=draw):
            if piece.step is not None and piece.step.phase == "decode":
                steps.append(piece.step)
        self.steps = steps[SKIPPED:]
        self.tokens = sum(step.tokens for step in self.steps)
        self.ms = sum(step.total_ms for step in self.steps) / self.tokens

    def per_token(self, name: str) -> float:
        """Of a metric."""
        return float(sum(getattr(step, name) for step in self.steps)) / self.tokens


def _figures(found: dict[str, list[Answer]]) -> Result:
    ms = {kind: [one.ms for one in of] for kind, of in found.items()}
    best = min(map(str, FIXED), key=lambda kind: median(ms[kind]))
    return {
        **{kind: {"ms": spread(ms[kind]), "rounds_ms": ms[kind], **dict(_about(of))} for kind, of in found.items()},
        "over_off": times(ms["off"], ms["lookup"])._asdict(),
        **{f"{kind}_over_off": times(ms["off"], ms[kind])._asdict() for kind in HEADS if kind in ms},
        "best_fixed": best,
        "best_over_off": times(ms["off"], ms[best])._asdict(),
        "differing": sum(_differing(found["off"][n], of[n]) for of in found.values() for n in range(len(of))),
    }


def _about(of: list[Answer]) -> Iterator[tuple[str, float]]:
    yield "tokens_per_pass", fmean(one.tokens / len(one.steps) for one in of)
    for name in ("drafted", "accepted", "requests", "draft_prefetch_hits", "draft_prefetch_wasted"):
        yield name, fmean(one.per_token(name) for one in of)


def _differing(one: Answer, other: Answer) -> int:
    """Logits with other bits; of tokens that only one has, all."""
    assert len(one.logits) == len(other.logits)
    return sum(int((a != b).sum()) for a, b in zip(one.logits, other.logits, strict=True))


def _verdict(found: dict[str, float | None], wanted: float) -> str:
    """Whether a ratio is surely as wanted, as far as there are enough texts to tell."""
    low, high = found["low"], found["high"]
    if low is None or high is None:
        return "of too few texts"
    return "kept" if low >= wanted else "MISSED" if high < wanted else "not told apart"


def table(r: Result) -> list[str]:
    faster, never_below = r["goals"]
    rows = []
    for of in r["rows"]:
        wanted = faster if of["text"] == "repeated" and of["resident"] <= HALF else never_below
        fixed = f"{of['best_fixed']}: {interval(of['best_over_off'])}"
        lookup, off = of["lookup"], of["off"]
        figures = (
            f"{off['ms']['median']:.2f}",
            f"{lookup['ms']['median']:.2f}",
            interval(of["over_off"]),
            f"{wanted:g} {_verdict(of['over_off'], wanted)}",
            fixed,
            f"{lookup['tokens_per_pass']:.2f}",
            f"{lookup['accepted']:.2f} of {lookup['drafted']:.2f}",
            f"{lookup['requests']:.1f} / {off['requests']:.1f}",
            str(of["differing"]),
        )
        link = f"{of['link_gbps']:.3g} GB/s" if of["link"] == "emulated" else "own"
        rows.append((of["budget"], link, of["text"], *figures))
    heads = ("budget", "link", "text", "off", "lookup", "faster", "goal", "best fixed", "a pass", "accepted", "experts")
    by_head = [
        (
            *row[:3],
            *(interval(of[f"{kind}_over_off"]) for kind in HEADS),
            *(f"{of[kind]['accepted']:.2f} of {of[kind]['drafted']:.2f}" for kind in HEADS),
        )
        for row, of in zip(rows, r["rows"], strict=True)
        if "mtp" in of
    ]
    return [
        f"{r['model']}: ms a token, medians of {r['rounds']} texts of {r['tokens']} tokens after {r['prompt']}, and "
        "how many times as fast, with the interval of the texts; links in GB/s are emulated",
        *grid((*heads, "bits"), rows),
        *(grid((*heads[:3], "head faster", "both", "head accepted", "both"), by_head) if by_head else []),
        "  a pass: tokens; accepted: of guessed ones, a token; experts: asked for, a token, with guesses and without; "
        "bits: logits that differ from those of off",
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 48, "budgets": "50%"})
