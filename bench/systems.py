"""bench systems: every preset at several budgets, live on one model, beside what none can beat.

The exact model writes answers; then every system reads the same prompts and draws the same tokens, so that all exact
systems route alike and Belady's hit rates are of that very routing. Every round takes each system at each budget once,
in turn; of each stand the figures of the round with its median time per token, so that the parts of that time add up.
Systems that change answers are evaluated too (core.evaluate). Presets that need a profile get one, calibrated once and
kept. Measurements are kept as they are made: an interrupted bench goes on where it was.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.generate import MIDDLE, SMALL, checkpoint
from bench.kept import KeptRows
from bench.predictors import READ, divided
from bench.systems_measure import (
    QUALITY,
    Workload,
    bounds,
    clock_of,
    judged,
    measured,
    median_round,
    recorded,
    usual,
    workload,
)
from bench.systems_table import table as table
from core.calibrate.gather import calibrate
from core.calibrate.texts import bundled
from core.engine import Engine
from core.errors import MoestroError, SettingError
from core.evaluate.modes import BASE, PLAIN, Mode
from core.evaluate.others import Others
from core.evaluate.rows import FIGURES
from core.evaluate.run import evaluate, gather
from core.memory.link import Pace, scaled_gbps
from core.metrics import BY_NAME
from core.profile import PARTS, Profile, load, profile_path, save
from core.session.manifest import device_name, versions
from core.settings.budget import Budget
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import PRESETS, Preset

BUDGETS = "25%,50%,75%"
GENERATED = "generated"  # name of the model that the bench writes itself
RESIDENT = "resident"  # the run with everything resident, and nothing to predict
LATENCY_US = 10.0
TEXT = 192  # tokens of held-out text that a lossy system is judged on
SMALL_PRESETS = ("on_demand", "mixtral_offloading", "speculating_execute")


def run(
    keep: Path,
    model: str = "demo",
    budgets: str = BUDGETS,
    rounds: int = 3,
    tokens: int = 192,
    questions: int = 24,
    small: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `keep` = the folder for what is kept: results so far, the profile, a
    generated model. `budgets`: shares or bytes, with commas between them. `tokens` = decoded tokens of a run,
    `questions` = asked of a system that changes answers."""
    asked = [Budget.parse(word) for word in budgets.split(",") if word.strip()]
    if not asked:
        raise SettingError("Name at least one budget, such as 25%,50% or 6.5GB.")
    presets = [one for one in PRESETS if not one.splits and (not small or one.name in SMALL_PRESETS)]
    if small:
        rounds, tokens, questions = 1, 12, 2
    folder = checkpoint(keep, SMALL if small else MIDDLE, say=say) if model == GENERATED else None
    largest = max(asked, key=lambda one: (one.share or 0.0, one.bytes or 0))  # what bytes pay for is not known yet
    engine = Engine.load(LoadSpec.checked(str(folder or model), Settings({"budget": str(largest)})))
    try:
        bench = Bench(
            engine, keep, model, [str(one) for one in asked], presets, (rounds, tokens, questions, small), say
        )
        return bench.run()
    finally:
        engine.unload()


@dataclass
class Bench:
    """One run of the bench on a loaded engine. `sizes` = rounds, tokens, questions, whether it is a smoke test."""

    engine: Engine
    keep: Path
    model: str
    budgets: Sequence[str]
    presets: Sequence[Preset]
    sizes: tuple[int, int, int, bool]
    say: Callable[[str], None]

    def run(self) -> dict[str, object]:
        engine, (rounds, tokens, questions, small) = self.engine, self.sizes
        others, profile = Others(), self.profile()
        kept = KeptRows(
            self.keep / "systems" / f"{engine.model_hash[:16]}{'-small' if small else ''}.jsonl",
            {
                "model": engine.model_hash,
                "profile": profile.created,
                "budgets": list(self.budgets),
                "sizes": [tokens, questions],
                "versions": versions(),
            },
        )
        self.say(f"{len(kept.rows)} measurements are there already")
        link = dict(kept.note("link", lambda: self.link(profile), anew=not kept.rows))
        base = engine.settings.with_({**BASE, **link, "predictor": "none", "telemetry": True})
        engine.change(dict(base))

        def answers() -> Workload:
            self.say("the exact model answers")
            return workload(engine, divided(bundled(self.name))[1], tokens)

        work: Workload = kept.note("workload", answers)
        if not work:
            raise MoestroError("The model gives no answers to the prompts, so there is nothing to measure.")
        self.times(kept, base, work, rounds)
        exact = self.quality(kept, base, questions)
        engine.change(dict(base))
        result = self.result(kept, profile, work, exact)
        result["others_cores"] = others.cores()
        kept.done()
        return result

    @property
    def name(self) -> str:
        return self.engine.model_name

    def profile(self) -> Profile:
        """The kept profile of this model, completed by what it lacks; gives it to the engine, too."""
        engine, small = self.engine, self.sizes[3]
        file = profile_path(self.keep, f"{engine.model_hash}{'-small' if small else ''}")
        old = load(file, model_hash=engine.model_hash) if file.exists() else None
        parts = {"counts", "times", *(part for one in self.presets for part in one.needs)} & PARTS.keys()
        lacks = {part for part in parts if old is None or not old.has(part)}
        if lacks:
            self.say(f"calibrating for {', '.join(sorted(lacks))}")
            new = calibrate(
                engine,
                divided(bundled(self.name))[0],
                parts=lacks,
                source="the bundled prompts",
                limit=400 if small else READ,
                progress=self._calibrating(),
            )
            old = new if old is None else new.over(old)
            file.parent.mkdir(parents=True, exist_ok=True)
            save(old, file)
        assert old is not None
        engine.use_profile(old)
        return old

    def _calibrating(self) -> Callable[[str, float], None]:
        """Says every tenth of a calibration."""
        last = -1

        def said(text: str, share: float) -> None:
            nonlocal last
            if int(10 * share) > last:
                last = int(10 * share)
                self.say(f"calibrating, {share:.0%}: {text}")

        return said

    def link(self, profile: Profile) -> dict[str, object]:
        """Settings of the link: the machine's own; where host and device share memory, for the demo model and a
        generated one an emulated link, as slow for them as PCIe is for a large model."""
        engine, times = self.engine, profile.times
        if pace := engine.transfers.pace:
            return {"link": "emulated", "link_gbps": pace.gbps, "link_latency_us": pace.latency_us}
        if self.model == GENERATED and engine.device.type == "cpu" and times is not None:
            gbps = scaled_gbps(times["att"] + times["moe"], engine.sizes.blob, LATENCY_US)
            return {"link": "emulated", "link_gbps": gbps, "link_latency_us": LATENCY_US}
        return {"link": "own"}

    def times(self, kept: KeptRows, base: Settings, work: Workload, rounds: int) -> None:
        """Every system at every budget, once a round; what is kept is not measured again."""
        there = {(row["round"], row["budget"], row["system"]) for row in kept.rows if "round" in row}
        everything: dict[str, object] = {"budget": "all", "predictor": "none", "eviction": "lru", "scope": "layer"}
        for number in range(1, rounds + 1):
            todo: list[tuple[str, str, Mapping[str, object]]] = [("all", RESIDENT, everything)]
            for budget in self.budgets:
                turned = [*self.presets[number - 1 :], *self.presets[: number - 1]]
                todo += [(budget, one.name, {**one.values, "budget": budget}) for one in turned]
            for at, (budget, name, settings) in enumerate(todo, 1):
                if (number, budget, name) in there:
                    continue
                row: dict[str, Any] = {"round": number, "budget": budget, "system": name}
                try:
                    found = measured(self.engine, work, base.with_(settings))
                    row |= found
                    said = f"{found['tpot_ms']:.2f} ms a token, {found['hit_rate'] or 0.0:.1%} hits"
                except MoestroError as error:
                    row["problem"] = said = str(error)
                kept.add(row)
                self.say(f"round {number} of {rounds}, {at} of {len(todo)}: {name} at {budget}: {said}")

    def quality(self, kept: KeptRows, base: Settings, questions: int) -> dict[str, Any] | None:
        """Evaluates the systems that change answers at every budget; returns the exact model's own figures, None where
        every system is exact."""
        lossy = [one for one in self.presets if Settings(one.values).lossy.active]
        if not lossy:
            return None
        engine, small = self.engine, self.sizes[3]
        there = {(row["mode"], row["at"]) for row in kept.rows if "mode" in row}
        material = gather(engine, questions, 8 if small else TEXT)
        exact = next(mode for mode in PLAIN if mode.name == "exact")
        engine.change(dict(base))
        for budget in self.budgets:
            modes = [Mode(one.name, one.title, one.about, one.values) for one in lossy]
            modes += [exact] if budget == self.budgets[0] else []
            share = engine.sizes.slots(Budget.parse(budget)) / engine.sizes.slots_all
            for mode in modes:
                if (mode.name, budget) in there or not 0 < share <= 1:
                    continue
                self.say(f"quality of {mode.title} at {budget}")
                [row] = evaluate(engine, [mode], [share], material)
                kept.add(
                    {
                        "mode": mode.name,
                        "at": budget,
                        "problem": row.problem,
                        **{name: getattr(row, name) for name in QUALITY},
                        "questions": row.questions,
                        "positions": row.positions,
                    }
                )
        return next((judged(row) for row in kept.rows if row.get("mode") == "exact"), None)

    def result(self, kept: KeptRows, profile: Profile, work: Workload, exact: dict[str, Any] | None) -> dict[str, Any]:
        """Everything as plain data."""
        engine, manifest = self.engine, self.engine.manifest()
        sizes, shape, slots_of = engine.sizes, engine.shape, {}
        for budget in self.budgets:
            slots_of[budget] = sizes.slots(Budget.parse(budget))
        qualities = {(row["mode"], row["at"]): judged(row) for row in kept.rows if "mode" in row}
        resident = median_round([row for row in kept.rows if row.get("system") == RESIDENT])
        resident_ms = resident.get("tpot_ms")
        pace = engine.transfers.pace or Pace(engine.wiring.parts.memory.link_gbps, 0.0)
        load_ms = pace.duration_s(sizes.blob) * 1e3
        clock = clock_of(profile, resident_ms, load_ms) if resident_ms is not None else None
        with tempfile.TemporaryDirectory() as folder:
            trace = recorded(engine, work, Path(folder) / "routing.trace")
            limits = {
                budget: bounds(trace, slots, usual(profile), resident_ms, pace, sizes.blob, clock)
                for budget, slots in slots_of.items()
            }
        return {
            "model": Path(self.model).name,
            "model_hash": engine.model_hash,
            "layers": shape.layers,
            "experts": shape.experts,
            "top_k": shape.top_k,
            "expert_bytes": sizes.blob,
            **{name: manifest[name] for name in manifest if name.startswith("link")},
            "budgets": {
                budget: {"slots": slots, "share": slots / sizes.slots_all, "bytes": sizes.bytes(slots)}
                for budget, slots in slots_of.items()
            },
            "rounds": max((row["round"] for row in kept.rows if "round" in row), default=0),
            "tokens": sum(len(answer) - 1 for _, answer in work),
            "prompts": len(work),
            "profile": {"tokens": profile.tokens, "source": profile.source, "created": profile.created},
            "units": {
                "ttft_ms": "ms",
                "tpot_ms": "ms",
                **{name: f"{one.unit} per token" for name, one in BY_NAME.items() if name in resident},
                **{name: FIGURES[name][0] for name in QUALITY},
                "hit_rate": "share",
            },
            "titles": {one.name: one.title for one in self.presets},
            "resident": resident,
            "exact_quality": exact,
            "bounds": limits,
            "systems": {
                one.name: {
                    budget: {
                        **median_round(
                            [r for r in kept.rows if (r.get("system"), r.get("budget")) == (one.name, budget)]
                        ),
                        "quality": qualities.get((one.name, budget)),
                    }
                    for budget in self.budgets
                }
                for one in self.presets
            },
            "decode_threads": manifest["decode_threads"],
            "device": device_name(engine.device),
            "versions": versions(),
        }
