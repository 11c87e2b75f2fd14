"""bench lossy: quality cost and gain of substituting, dropping and executing predictions on this machine.

Two tables. The first is like BuddyMoE's tables 2 to 4: residencies x modes on the demo model's questions and held-out
text (core.measure.evaluate). The second is like figures 3, 4, 7 and 8 of Speculating Experts
(bench.quality.speculating), whose table 1 is the execute modes of the first. Measurements are saved as they are made:
an interrupted bench continues where it was."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.cli.eval import rows_table
from bench.harness.resume import KeptRows
from bench.harness.run import Result, Run, Suite
from bench.quality import speculating
from core.engine import Engine
from core.measure.evaluate.calibrated import calibrated
from core.measure.evaluate.modes import modes_of
from core.measure.evaluate.others import MUCH
from core.measure.evaluate.rows import EvaluationRow, with_savings
from core.measure.evaluate.run import evaluate, gather
from core.measure.evaluate.summary import about, result
from core.profile import Profile, load, save

RESIDENCIES = (0.75, 0.5, 0.375)


def measure(run: Run, model: str = "demo", questions: int = 64, tokens: int = 512, rounds: int = 3) -> Result:
    """Rows stay in the run's folder until all are measured."""
    modes = [mode for mode in modes_of() if not run.small or mode.name in ("exact", "drop", "execute_gate")]
    engine = run.engine(model, {})
    material = gather(engine, questions, tokens)
    sizes = {"model": engine.model_hash, "questions": questions, "tokens": tokens, "small": run.small}
    kept = Kept(run.folder(), sizes)
    run.say(f"{len(kept.rows)} of {len(modes) * len(RESIDENCIES)} rows are there; more are kept in {kept.folder}")
    profile = known(run, engine, modes, kept)
    rows = list(kept.rows)
    engine.change(kept.link(engine))

    def add(row: EvaluationRow) -> None:
        kept.add(row)
        rows.append(row)
        figures = f"exact match {row.exact_match}, kl {row.kl or 0.0:.4f}, {row.tok_s or 0.0:.1f} tok/s"
        run.say(f"{row.residency:.4g} {row.mode}: {row.problem or figures}")

    evaluate(engine, modes, RESIDENCIES, material, on_row=add, done={row.key for row in rows})
    place = {mode.name: at for at, mode in enumerate(modes)}
    rows = with_savings(sorted(rows, key=lambda row: (-row.residency, place[row.mode])))
    found = result(about(engine, material), rows)
    ahead = speculating.measure(run, engine, material.questions, rounds)
    kept.done()
    return {**found, "redundancy": redundancy(profile), "speculating": ahead}


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


def known(run: Run, engine: Engine, modes: Sequence[Any], kept: Kept) -> Profile | None:
    """Gives the engine its profile: the saved one, or a new one."""
    engine.use_profile(kept.profile(engine.model_hash))
    run.say("calibrating")
    profile = calibrated(engine, [*modes, *speculating.MODES], limit=200 if run.small else 0)
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


def table(r: Result) -> list[str]:
    lines = [
        f"{r['model']}: {r['questions']['seen']} + {r['questions']['unseen']} questions, {r['text']['tokens']} "
        f"tokens of {r['text']['source']}; link: {r['link']}."
    ]
    lines += ["* = on the front of exact match and speed", *rows_table(r)]
    busiest = max((one["others_cores"] or 0.0 for one in r["rows"]), default=0.0)
    if busiest > MUCH:
        lines.append(f"Other programs used up to {busiest:.1f} CPU cores: compare speeds with care.")
    if r["redundancy"]:
        cosines = " ".join(f"{cosine:.2f}" for cosine in r["redundancy"])
        lines.append(f"Cosine with the most similar expert, by layer: {cosines}")
    return [*lines, *speculating.table(r["speculating"])]


SUITE = Suite(measure, table, small={"questions": 2, "tokens": 8, "rounds": 1})
