"""What a text took under two settings, A and B. `core.measure.evaluate.beside` measures it."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from core.engine.passages import STRETCH
from core.engine.quality.interval import margin, mean_error
from core.errors import SettingError

ROUNDS, TOKENS = 3, 96  # defaults
MOST_ROUNDS, MOST_TOKENS = 20, 512  # A's logits of all tokens are kept: 4 V bytes each
FEWEST = 2 * STRETCH  # tokens, of which an interval can be told


@dataclass(frozen=True, slots=True)
class Side:
    """What the tokens took under one of the settings: `token_ms` of each, the median of the rounds; rates are of the
    decoded tokens of all rounds, and the rest are means of them."""

    first_ms: float  # the prompt, and the first token
    token_ms: tuple[float, ...]
    hit_rate: float | None
    misses: float
    stall_ms: float
    link_bytes: float
    changed: float | None  # share of the routers' assignments that was not computed as chosen
    emulated: bool

    @property
    def tok_s(self) -> float:
        return 1e3 * len(self.token_ms) / sum(self.token_ms)


@dataclass(frozen=True, slots=True)
class Sides:
    """`differing`: the settings that A and B have not in common, as they are there. `equal`: tokens whose logits are
    bit for bit the same, `agreed`: those with the same likeliest token, `kl`: mean divergence of B from A, nats."""

    model: str
    names: tuple[str, str]
    question: str
    text: str
    prompt_tokens: int
    rounds: int
    differing: Mapping[str, tuple[Any, Any]]
    a: Side
    b: Side
    equal: int
    agreed: int
    kl: float

    @property
    def tokens(self) -> int:
        """Tokens that were decoded under both."""
        return len(self.a.token_ms)

    @property
    def ratio(self) -> tuple[float, float, float] | None:
        """B's time per token over A's with its 95 % interval, over stretches of STRETCH tokens; None of fewer than two.
        Longer than 1: A is the faster one."""
        if self.tokens < FEWEST:
            return None
        sums = [
            [sum(side.token_ms[at : at + STRETCH]) for at in range(0, self.tokens - STRETCH + 1, STRETCH)]
            for side in (self.a, self.b)
        ]
        mean, error = mean_error([math.log(b / a) for a, b in zip(*sums, strict=True)])
        half = margin(error)
        return math.exp(mean), math.exp(mean - half), math.exp(mean + half)

    @property
    def verdict(self) -> str:
        """ "a" or "b" is faster beyond noise, or "" for neither."""
        found = self.ratio
        return "" if found is None or found[1] <= 1 <= found[2] else "a" if found[0] > 1 else "b"

    def dump(self) -> dict[str, Any]:
        """As plain JSON values."""
        return asdict(self)

    @classmethod
    def read(cls, kept: Mapping[str, Any]) -> Self:
        """Read from `dump`. Raises TypeError or KeyError for a format of another version."""
        sides = {name: Side(**{**kept[name], "token_ms": tuple(kept[name]["token_ms"])}) for name in ("a", "b")}
        differing = {name: (a, b) for name, (a, b) in kept["differing"].items()}
        return cls(**{**kept, **sides, "names": tuple(kept["names"]), "differing": differing})

    def csv(self) -> str:
        """A line for each token: its time under A and under B, in milliseconds; above them what A and B are, and the
        link where it is emulated."""
        out = io.StringIO()
        out.write(f"# A: {self.names[0]}, B: {self.names[1]}\n")
        if self.a.emulated or self.b.emulated:
            out.write("# link: emulated\n")
        for name, (a, b) in self.differing.items():
            out.write(f"# {name}: A {a}, B {b}\n")
        lines = csv.writer(out, lineterminator="\n")
        lines.writerow(["token", "a_ms", "b_ms"])
        lines.writerows(
            (at, round(a, 4), round(b, 4))
            for at, (a, b) in enumerate(zip(self.a.token_ms, self.b.token_ms, strict=True), 1)
        )
        return out.getvalue()


def check(prompt: str, tokens: int, rounds: int) -> None:
    """Raises SettingError for what cannot be compared."""
    if not prompt.strip():
        raise SettingError("Type a question for both settings.")
    if not FEWEST <= tokens <= MOST_TOKENS:
        raise SettingError(f"Compare {FEWEST} to {MOST_TOKENS} tokens.")
    if not 1 <= rounds <= MOST_ROUNDS:
        raise SettingError(f"Compare in 1 to {MOST_ROUNDS} rounds.")
