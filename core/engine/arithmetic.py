"""Which arithmetic computes a loaded model, and how far its answers are from the reference's.

The distance of the fast arithmetic is a figure of a model in its formats and compute type. `core.engine.distance`
measures it, once: it is kept in a file, where one is named, for later loads on the same machine, else for the life of
the process. The setting `auto` takes the fast arithmetic where that distance is within the bound (`objection`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from core import __version__
from core.engine.quality.interval import Share, margin, share_of
from core.system import kept_file

if TYPE_CHECKING:  # it needs torch, and a start of the dashboard does not
    from core.capacity.plan import Plan

log = logging.getLogger("moestro.load")

VERSION = 2  # of the fast arithmetic and of rounding: to be raised when their bits change
BOUND = 0.002  # of the KL, nats a token: what the rounding of states to 8 bits may cost
ROUNDING_BF16 = 0.002  # what the reference itself is off by in bf16, which comes on top; measured: .0014 to .0036
ENOUGH = 100  # tokens, of which fewer tell too little
SHOWN = "model", "format", "dense", "dtype"  # what a kept distance is of


@dataclass(frozen=True, slots=True)
class Distance:
    """The fast arithmetic beside the reference on the same text, weights and formats, over `tokens` predicted
    tokens."""

    tokens: int
    kl: float  # KL(reference || fast), nats per token
    kl_error: float  # its standard error
    kl_most: float  # the largest of a token
    agreed: int  # tokens whose likeliest next token is the reference's
    perplexity: float
    reference_perplexity: float
    closeness: float  # largest difference of logits, as a share of the largest logit at its place

    @property
    def kl_high(self) -> float:
        """The upper end of the KL's 95 % interval."""
        return self.kl + margin(self.kl_error)

    @property
    def agreement(self) -> Share:
        """The share of `agreed`, with its 95 % interval."""
        share = share_of(self.agreed, self.tokens)
        assert share is not None
        return share

    def facts(self) -> dict[str, float]:
        """All of it as plain values."""
        share = self.agreement
        shares = {"agreement": share.value, "agreement_low": share.low, "agreement_high": share.high}
        return {**asdict(self), "kl_high": self.kl_high, **shares}

    @property
    def measured_kl(self) -> str:
        """The KL with n and its interval, in words."""
        return f"KL {self.kl:.2g} nats a token over {self.tokens} tokens (95 %: up to {self.kl_high:.2g})"

    def __str__(self) -> str:
        share = self.agreement
        agreed = f"{100 * share.value:.1f} % (95 %: {100 * share.low:.1f} to {100 * share.high:.1f} %)"
        perplexity = f"perplexity {self.perplexity:.4g} ({self.reference_perplexity:.4g})"
        return f"{self.measured_kl}, likeliest token the same for {agreed}, {perplexity}"


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What computes the passes of a load, as it was chosen or as `auto` took it."""

    name: Literal["reference", "fast", "fast_experts"] = "reference"  # the last: all else by transformers' modules
    fallback: str = ""  # why the reference computes, or all but the experts; "" = it was chosen, or the fast one does
    distance: Distance | None = None  # of the fast one; None: it was not measured, or the reference computes

    @property
    def fast(self) -> bool:
        """Whether at least the experts are computed in the fast arithmetic."""
        return self.name != "reference"

    def closeness(self, reference: float) -> float | None:
        """Largest difference of exact logits from transformers' own, as a share of the largest; None: not measured.
        `reference`: that of the reference arithmetic."""
        if not self.fast:
            return reference
        return self.distance.closeness if self.distance is not None else None

    def facts(self) -> dict[str, Any]:
        """All of it as plain values, for the manifest, the page and the API."""
        found = self.distance.facts() if self.distance is not None else None
        return {"arithmetic": self.name, "fallback": self.fallback, "distance": found}

    def stats(self) -> dict[str, Any]:
        """What an answer's statistics contain of it."""
        found = self.distance
        return {
            "arithmetic": self.name,
            "distance_kl": found.kl if found is not None else None,
            "distance_tokens": found.tokens if found is not None else 0,
        }


REFERENCE = Arithmetic()
_file: Path | None = None
_of_process: dict[str, Distance] = {}  # where no file is named


def objection(distance: Distance, dtype: str) -> str:
    """Why `auto` does not take the fast arithmetic with this distance in a compute type ("bfloat16"), for the user;
    "" = it does: the KL is surely within the bound."""
    bound = BOUND + (ROUNDING_BF16 if dtype == "bfloat16" else 0.0)
    if distance.tokens < ENOUGH:
        return f"the fast arithmetic's distance was measured over too few tokens to tell: {distance.measured_kl}"
    if distance.kl_high <= bound:
        return ""
    return f"the fast arithmetic's distance is not surely within {bound:g}: {distance.measured_kl}"


def keep_in(file: Path | None) -> None:
    """Keep distances in this file, and take those that are there; None = keep them for the life of the process."""
    global _file
    _file = file


def known(plan: Plan, model_hash: str) -> Distance | None:
    """The kept distance of this model in these formats, if there is one."""
    key = _key(plan, model_hash)
    if _file is None:
        return _of_process.get(key)
    kept = kept_file.read(_file, log).get(key)
    return _distance(kept) if kept is not None else None


def keep(plan: Plan, model_hash: str, distance: Distance) -> None:
    """Keep a distance for later loads. Another process's at the same moment may be lost."""
    key = _key(plan, model_hash)
    if _file is None:
        _of_process[key] = distance
        return
    shown = dict(zip(SHOWN, (Path(plan.spec.model).name, plan.format, plan.spec.dense, plan.compute_type), strict=True))
    kept_file.replace(_file, {**kept_file.read(_file, log), key: {**shown, **asdict(distance)}}, log)


def kept_in(file: Path) -> list[tuple[dict[str, str], Distance]]:
    """What a file has of this version: (values of SHOWN, distance)."""
    end = f" {_version()}"
    rows = [row for key, row in kept_file.read(file, log).items() if key.endswith(end)]
    return [
        ({name: str(row.get(name, "")) for name in SHOWN}, distance)
        for row in rows
        if (distance := _distance(row)) is not None
    ]


def _key(plan: Plan, model_hash: str) -> str:
    """All that a distance depends on."""
    return f"{model_hash} {plan.format} {plan.spec.dense} {plan.compute_type} {_version()}"


def _version() -> str:
    return f"{__version__}-{VERSION}"


def _distance(row: object) -> Distance | None:
    """A distance out of a file; None where it is damaged."""
    if not isinstance(row, dict):
        return None
    found: dict[str, Any] = {one.name: row.get(one.name) for one in fields(Distance)}
    whole = all(type(found[name]) is int for name in ("tokens", "agreed"))
    if not whole or not all(type(value) in (int, float) and math.isfinite(value) for value in found.values()):
        return None
    distance = Distance(**found)
    return distance if 0 <= distance.agreed <= distance.tokens and distance.tokens else None
