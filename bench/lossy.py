"""bench lossy: quality cost and gain of substituting, dropping and executing predictions on this machine.

Two tables. The first is like BuddyMoE's tables 2 to 4: residencies x modes on the demo model's questions and held-out
text (core.evaluate). The second is like figures 3, 4, 7 and 8 of Speculating Experts (bench.speculating), whose table 1
is the execute modes of the first. Which of the papers' orderings hold is computed from the numbers. Measurements are
saved as they are made: an interrupted bench continues where it was.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench import speculating
from bench.claims import verdict
from bench.kept import KeptRows
from core.engine import Engine
from core.evaluate.calibrated import calibrated
from core.evaluate.modes import modes_of
from core.evaluate.others import MUCH
from core.evaluate.rows import EvaluationRow, with_savings
from core.evaluate.run import evaluate, gather
from core.evaluate.summary import about, result
from core.profile import Profile, load, save
from core.settings.loading import LoadSpec

RESIDENCIES = (0.75, 0.5, 0.375)
QUESTIONS, TOKENS = 64, 512
LOWER = ("kl", "perplexity", "tpot_ms", "link_bytes")  # figures of which less is better


@dataclass(frozen=True, slots=True)
class Claim:
    """An ordering that a paper, or others, report of their models: the modes, best first, in some figures."""

    text: str
    modes: tuple[str, ...]
    figures: tuple[str, ...] = ("exact_match", "kl")


CLAIMS = (
    Claim(
        "BuddyMoE tables 2-4: exact above buddies with rho 3 above buddies without limit above random",
        ("exact", "buddy_rho3", "buddy_unlimited", "random"),
    ),
    Claim(
        "BuddyMoE tables 2-4: speed the other way round",
        ("random", "buddy_unlimited", "buddy_rho3", "exact"),
        ("tok_s",),
    ),
    Claim("BuddyMoE tables 2-4: rho 3 above rho 4", ("buddy_rho3", "buddy_rho4")),
    Claim(
        "Expected: the fewer replacements a token, the better", ("buddy_rho1", "buddy_rho2", "buddy_rho3", "buddy_rho4")
    ),
    Claim("BuddyMoE section 3.1: leaving peaked tokens alone helps, rho 3", ("buddy_rho3_tae", "buddy_rho3")),
    Claim("BuddyMoE section 3.1: leaving peaked tokens alone helps, rho 1", ("buddy_rho1_tae", "buddy_rho1")),
    Claim(
        "BuddyMoE tables 2-4 in their regime: exact above rho 3 of 6 above no limit above random",
        ("paper_exact", "paper_95_16_rho3", "paper_95_16", "paper_random"),
    ),
    Claim("BuddyMoE tables 2-4 in their regime: rho 3 of 6 above 4 of 6", ("paper_95_16_rho3", "paper_95_16_rho4")),
    Claim(
        "BuddyMoE table 2 in its regime: alpha .75 and lists of 4 above .95 and 16",
        ("paper_75_4", "paper_95_16"),
    ),
    Claim(
        "BuddyMoE table 3 in its regime: alpha .99 and lists of 2 above .95 and 16",
        ("paper_99_2", "paper_95_16"),
    ),
    Claim("Ours: rho 1 spent on the lightest above on the heaviest", ("buddy_rho1", "buddy_rho1_heaviest")),
    Claim("Ours: the same, with TAE", ("buddy_rho1_tae", "buddy_rho1_tae_heaviest")),
    Claim("Ours: the same, of one dropped", ("drop_rho1", "drop_rho1_heaviest")),
    Claim(
        "BuddyMoE figure 8: fewer link bytes with rho 3 than exact (there by a fifth)",
        ("buddy_rho3", "exact"),
        ("link_bytes",),
    ),
    Claim("Reported elsewhere: the router's next best above the most alike", ("router_ranked", "similar")),
    Claim("Reported elsewhere: one buddy a token above one expert dropped", ("buddy_rho1", "drop_rho1")),
    Claim("Reported elsewhere: renormalising after dropping hurts", ("drop", "drop_renormalised")),
    Claim(
        "After Speculating Experts figures 3 and 4: executing default vectors' choice above the next gate's",
        ("execute_default_vectors", "execute_gate"),
    ),
    Claim("The same with the true router's weights", ("execute_default_vectors_true", "execute_gate_true")),
    Claim(
        "Speculating Experts table 1: executing the estimator's choice above default vectors'",
        ("execute_estimator", "execute_default_vectors"),
    ),
    Claim(
        "Speculating Experts table 1: executing the hybrid's choice above default vectors'",
        ("execute_hybrid", "execute_default_vectors"),
    ),
    Claim(
        "Ours: executing in decoding only above executing in prompts, too",
        ("execute_default_vectors_true", "execute_prompts"),
    ),
    Claim(
        "Expected: executing with true weights above predicted ones",
        ("execute_default_vectors_true", "execute_default_vectors"),
    ),
)


def run(
    keep: Path,
    model: str = "demo",
    questions: int = QUESTIONS,
    tokens: int = TOKENS,
    rounds: int = 3,
    small: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `keep` = the folder for intermediate results."""
    if small:
        questions, tokens, rounds = 2, 8, 1
    modes = [mode for mode in modes_of() if not small or mode.name in ("exact", "drop", "execute_gate")]
    engine = Engine.load(LoadSpec.checked(model))
    try:
        material = gather(engine, questions, tokens)
        kept = Kept(keep, {"model": engine.model_hash, "questions": questions, "tokens": tokens, "small": small})
        say(f"{len(kept.rows)} of {len(modes) * len(RESIDENCIES)} rows are there; more are kept in {kept.folder}")
        profile = known(engine, modes, kept, small, say)
        rows = list(kept.rows)
        engine.change(kept.link(engine))

        def add(row: EvaluationRow) -> None:
            kept.add(row)
            rows.append(row)
            say(
                f"{row.residency:.4g} {row.mode}: "
                + (
                    row.problem
                    or f"exact match {row.exact_match}, kl {row.kl or 0.0:.4f}, {row.tok_s or 0.0:.1f} tok/s"
                )
            )

        evaluate(engine, modes, RESIDENCIES, material, on_row=add, done={row.key for row in rows})
        place = {mode.name: at for at, mode in enumerate(modes)}
        rows = with_savings(sorted(rows, key=lambda row: (-row.residency, place[row.mode])))
        found = result(about(engine, material), rows)
        ahead = speculating.measure(engine, material.questions, rounds, small, say)
        kept.done()
    finally:
        engine.unload()
    return {
        **found,
        "redundancy": redundancy(profile),
        "speculating": ahead,
        "orderings": [*orderings(found["rows"]), *speculating.orderings(ahead)],
    }


class Kept:
    """Saves rows as they are measured, with the link and the profile they are based on, in a folder of `folder`; rows
    of anything other than `measured` are discarded."""

    def __init__(self, folder: Path, measured: Mapping[str, object]) -> None:
        self.folder = folder / "lossy"
        self._kept = KeptRows(self.folder / "rows.jsonl", measured)
        self._profile = self.folder / "profile.safetensors"
        self.rows = [EvaluationRow.read(row) for row in self._kept.rows]

    def link(self, engine: Engine) -> dict[str, object]:
        """Settings of the link for all rows. What "auto" emulates is timed anew with every load, so the value from the
        first row is kept."""

        def now() -> dict[str, object]:
            pace = engine.transfers.pace
            if not pace:
                return {"link": "own"}
            return {"link": "emulated", "link_gbps": pace.gbps, "link_latency_us": pace.latency_us}

        return dict(self._kept.note("link", now, anew=not self.rows))

    def add(self, row: EvaluationRow) -> None:
        """Saves a row; it is on disk when this returns."""
        self._kept.add(asdict(row))

    def profile(self, model_hash: str) -> Profile | None:
        """The profile that the saved rows are based on."""
        return load(self._profile, model_hash=model_hash) if self.rows and self._profile.exists() else None

    def save(self, profile: Profile) -> None:
        save(profile, self._profile)

    def done(self) -> None:
        """Everything was measured: the next run starts anew."""
        self._kept.done()
        self._profile.unlink(missing_ok=True)


def known(engine: Engine, modes: Sequence[Any], kept: Kept, small: bool, say: Callable[[str], None]) -> Profile | None:
    """Gives the engine its profile: the saved one, or a new one."""
    engine.use_profile(kept.profile(engine.model_hash))
    say("calibrating")
    profile = calibrated(engine, [*modes, *speculating.MODES], limit=200 if small else 0)
    if profile is not None:
        kept.save(profile)
    return profile


def redundancy(profile: Profile | None) -> list[float] | None:
    """[L] cosine of an expert's outputs with its most similar expert's, mean over a layer's experts."""
    if profile is None or profile.likeness is None:
        return None
    return [
        statistics.fmean(max(float(one[j]) for j in range(len(one)) if j != i) for i, one in enumerate(layer))
        for layer in profile.likeness
    ]


def orderings(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which claims hold here, at every residency: each mode's figure, best first as claimed."""
    by_key = {(row["residency"], row["mode"]): row for row in rows}
    said = []
    for claim in CLAIMS:
        for figure in claim.figures:
            table = {
                f"{share:g}": [by_key.get((share, mode), {}).get(figure) for mode in claim.modes]
                for share in dict.fromkeys(row["residency"] for row in rows)
            }
            said.append(
                {
                    "claim": claim.text,
                    "figure": figure,
                    "modes": claim.modes,
                    "values": table,
                    "holds": verdict(list(table.values()), lower=figure in LOWER),
                }
            )
    return said


def table(found: Mapping[str, Any]) -> str:
    """The result as text."""
    heads = ("match", "unseen", "perpl.", "agree", "KL", "changed", "MB/tok", "saved", "tok/s")
    forms = (
        ("exact_match", "{:.1%}"),
        ("unseen_match", "{:.1%}"),
        ("perplexity", "{:.1f}"),
        ("agreement", "{:.1%}"),
        ("kl", "{:.3f}"),
        ("substituted_rate", "{:.1%}"),
        ("link_bytes", "{:.3f}"),
        ("saved", "{:.1%}"),
        ("tok_s", "{:.1f}"),
    )
    lines = [
        f"{found['model']}: {found['questions']['seen']} + {found['questions']['unseen']} questions, "
        f"{found['text']['tokens']} tokens of {found['text']['source']}; link: {found['link']}."
    ]
    for share in dict.fromkeys(one["residency"] for one in found["rows"]):
        lines += [
            f"Residency {share:g} (* = on the front of exact match and speed):",
            f"  {'':32s}" + "".join(f"{head:>9s}" for head in heads),
        ]
        for one in (one for one in found["rows"] if one["residency"] == share):
            mark = "*" if one["mode"] in found["pareto"][f"{share:g}"] else " "
            cells = (
                "-" if (value := one[name]) is None else form.format(value / (1e6 if name == "link_bytes" else 1))
                for name, form in forms
            )
            lines.append(f" {mark}{one['mode']:32s}" + (one["problem"] or "".join(f"{cell:>9s}" for cell in cells)))
    busiest = max((one["others_cores"] or 0.0 for one in found["rows"]), default=0.0)
    if busiest > MUCH:
        lines.append(f"Other programs used up to {busiest:.1f} CPU cores meanwhile: compare speeds with care.")
    if found["redundancy"]:
        lines.append(
            "Cosine with the most similar expert, by layer: "
            + " ".join(f"{cosine:.2f}" for cosine in found["redundancy"])
        )
    return "\n".join(
        [
            *lines,
            *speculating.table(found["speculating"]),
            "The papers' orderings here:",
            *(f"  {one['holds']:13s}{one['figure']:12s} {one['claim']}" for one in found["orderings"]),
        ]
    )
