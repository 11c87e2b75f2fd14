"""What a page on a paper is made of: what it proposes, where that is here, and every table and figure with its answer.

A row is a declaration: `Ask` says which blocks of which bench are compared (`bench.papers.verdicts` does), `Never` and
`Stated` answer without a result. A change of what a result depends on takes a line in REPAIRS and its name in the rows
that it touches: an answer from before it is stale."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

HOLDS, PART, NO = "holds", "holds in part", "does not hold"
UNTOLD = "not told apart"  # nothing is beyond its noise, or there is no noise to compare it with
NEVER = "not asked here"
VERDICTS = (HOLDS, PART, NO, UNTOLD, NEVER)


@dataclass(frozen=True, slots=True)
class Repair:
    """A change after which what was measured before it is no answer. `landed`: ISO 8601."""

    what: str
    landed: str


REPAIRS: Mapping[str, Repair] = {
    "rho": Repair("rho is spent on the lightest missing experts", "2026-11-22T16:00:00+00:00"),
    "execute": Repair("predictions are executed while decoding only", "2026-11-22T16:00:00+00:00"),
    "finemoe_eviction": Repair("FineMoE's eviction goes by the whole map found", "2026-11-22T16:00:00+00:00"),
    "lcp": Repair("LCP counts every token of a prompt", "2026-11-25T17:15:00+00:00"),
    "tops": Repair("a prompt leaves the tops of split experts", "2026-11-25T17:15:00+00:00"),
    "arrival": Repair("an answer issues its prefetches when it arrives", "2026-11-25T17:15:00+00:00"),
    "order": Repair("a predictor orders its prefetches", "2026-11-25T17:15:00+00:00"),
    "guard": Repair("presets have their papers' gates, and no guard of ours", "2026-11-25T17:15:00+00:00"),
    "layer0": Repair("MoEpic's layer 0 goes by the last layer's state", "2026-11-22T16:00:00+00:00"),
    "live_searches": Repair("searches answer when they do in the engine", "2026-11-22T18:21:04+00:00"),
    "residents": Repair("a prefetch displaces only what is worth less", "2026-11-22T19:00:00+00:00"),
    "path_predictor": Repair("ExpertFlow's predictor answers before the pass", "2026-11-22T19:22:26+00:00"),
    "estimator": Repair("the estimator learns from as much as a setting says", "2026-11-22T18:51:42+00:00"),
}


@dataclass(frozen=True, slots=True)
class Answer:
    """`files` and `date`: the results it was read from, and the oldest one's date. `stale`: why these are no longer the
    engine's, "" = they are. `unmeasured`: no result has what is compared."""

    verdict: str
    text: str
    files: tuple[str, ...] = ()
    date: str = ""
    stale: str = ""
    unmeasured: bool = False

    @property
    def due(self) -> bool:
        """Whether running the row's command would say more."""
        return self.unmeasured or bool(self.stale)


@dataclass(frozen=True, slots=True)
class Stated:
    """An answer with its reason, read from no result."""

    verdict: str
    text: str


def never(reason: str) -> Stated:
    """Not asked here, and why."""
    return Stated(NEVER, reason)


DRAWING = never("Drawings of how it works: they hold no measurement.")
Pair = tuple[str, str | float]
"""A subject, and the subject or the number that it is claimed to be better than."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Comparisons of subjects, block by block, in the newest results of each model.

    `blocks`: where a result has the list of a subject's blocks, as keys with / between them; `{}` stands for the
    subject, `{at}` for the group (a budget, a layer) within which subjects are compared. `at`: these groups alone.
    `budget`: results of this one alone. `figure`: what the blocks are, for its unit and direction. `margin`: how much
    worse than claimed still holds, for what is claimed to be as good. `learned`: the claim is about what a trained
    model's routing or states have, so that random weights answer nothing. `copies`: the least copy time over compute
    time of a layer at which it is asked; `controls`: what is held equal, or differs from the paper."""

    bench: str  # several with spaces between them: results of all count, the first one's command is shown
    blocks: str
    pairs: tuple[Pair, ...]
    figure: str
    at: tuple[str, ...] = ()
    margin: float = 0.0
    learned: bool = False
    copies: float = 0.0
    controls: str = ""
    budget: str = ""
    options: str = ""

    @property
    def command(self) -> str:
        """The words of `launch.py` that measure it again."""
        name = self.bench.split()[0]
        return " ".join(part for part in ("eval" if name == "eval" else f"bench {name}", self.options) if part)

    @property
    def timed(self) -> bool:
        """Whether the figure is one that other programs and another arithmetic change."""
        return self.figure in TIMED


TIMED = ("tpot_ms", "ttft_ms", "share_of_token", "speedup")


def chain(*names: str) -> tuple[Pair, ...]:
    """Each of the names above the next one."""
    return tuple(itertools.pairwise(names))


def above(best: str, *others: str) -> tuple[Pair, ...]:
    """One name above each of the others."""
    return tuple((best, other) for other in others)


@dataclass(frozen=True, slots=True)
class Row:
    """A table or figure of a paper. `asks`: what it says, in our words; `touched`: names of REPAIRS that its answer
    depends on."""

    where: str
    asks: str
    source: Ask | Stated
    touched: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The words of `launch.py` that measure it again; "" = none can."""
        return self.source.command if isinstance(self.source, Ask) else ""

    def before(self, date: str) -> tuple[Repair, ...]:
        """The repairs that a measurement of this date was made before."""
        made = datetime.fromisoformat(date)
        repairs = [REPAIRS[name] for name in self.touched]
        return tuple(one for one in repairs if made < datetime.fromisoformat(one.landed))


@dataclass(frozen=True, slots=True)
class Part:
    """A mechanism of a paper, and where it is here. `settings`: names of settings, and values as name=value."""

    what: str
    file: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Paper:
    """`lacks`: what of it is not here; `regime`: copy time over compute time of a layer where it measured."""

    name: str
    title: str
    proposes: str
    parts: tuple[Part, ...]
    presets: tuple[str, ...]
    lacks: str
    regime: str
    rows: tuple[Row, ...]
