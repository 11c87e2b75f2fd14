"""bench systems: every preset at several budgets, live on one model, with the bounds that none can beat.

The exact model writes answers; then every system reads the same prompts and draws the same tokens, so that all exact
systems route alike and Belady's hit rates are of that very routing. Each system of the literature runs as in its paper,
and where its prefetches evict residents once more with our guard, the same for all. Every round takes each system at
each budget once; the figures of a system are those of the round with its median time per token, so that the parts of
that time add up. Systems that change answers are evaluated too (core.measure.evaluate). Presets that need a profile get
one, calibrated once and kept. Measurements are kept as they are made: an interrupted bench continues."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.harness.engines import READ, blocks_of, divided, emulated_link, model_of, pace_of
from bench.harness.resume import KeptRows
from bench.harness.run import Result, Run, Suite
from bench.harness.workload import (
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
from bench.models.sizes import MIDDLE
from bench.quality.systems_result import table
from core.engine import Engine
from core.engine.texts import bundled
from core.errors import MoestroError, SettingError
from core.measure.calibrate.gather import calibrate
from core.measure.evaluate.modes import BASE, PLAIN, Mode
from core.measure.evaluate.others import Others
from core.measure.evaluate.rows import FIGURES
from core.measure.evaluate.run import evaluate, gather
from core.metrics import BY_NAME
from core.policy.allocation.configurator import plan_cache
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import PARTS, Profile, load, profile_path, save
from core.settings.budget import Budget
from core.settings.calibration import CalibrationSettings
from core.settings.config import Settings
from core.settings.preset import Preset
from core.settings.presets import PRESETS, guarded
from core.settings.presets import preset as preset_of

WHOLE_MOEPIC = "moepic_split"  # the one preset of split experts: others are its ablations (bench split)
RESIDENT = "resident"  # the run with everything resident, and nothing to predict
EVERYTHING: dict[str, object] = {"budget": "all", "predictor": "none", "eviction": "lru", "scope": "layer"}
TEXT = 192  # tokens of held-out text that a lossy system is judged on
SMALL_PRESETS = ("on_demand", "mixtral_offloading", "speculating_execute", WHOLE_MOEPIC)


def measure(
    run: Run,
    model: str = "demo",
    budgets: str = "25%,50%,75%",
    rounds: int = 5,
    tokens: int = 192,
    questions: int = 24,
    preset: str = "",
) -> Result:
    """`budgets`: shares or bytes, with commas between them. `tokens` = decoded tokens of a run, `questions` = asked of
    a system that changes answers. `preset`: those to run, with commas between them; all where none is named."""
    asked = [Budget.parse(word) for word in budgets.split(",") if word.strip()]
    if not asked:
        raise SettingError("Name at least one budget, such as 25%,50% or 6.5GB.")
    named = [preset_of(word.strip()) for word in preset.split(",") if word.strip()]
    chosen = [one for one in PRESETS if not one.splits or one.name == WHOLE_MOEPIC]
    presets = systems(named or [one for one in chosen if not run.small or one.name in SMALL_PRESETS])
    path = model_of(run, model, MIDDLE)
    largest = max(asked, key=lambda one: (one.share or 0.0, one.bytes or 0))  # what bytes pay for is not known yet
    engine, others = run.engine(path, {"budget": str(largest)}), Others()
    split = run.engine(path, {"budget": str(largest)}, blocks=blocks_of(path, run.small))
    bench = Bench(run, engine, split, path != model, [str(one) for one in asked], presets)
    found = bench.all(rounds, tokens, questions)
    return {**found, "model": Path(model).name, "others_cores": others.cores()}


def systems(presets: Sequence[Preset]) -> list[Preset]:
    """Those to compare: each, and behind it the same with our guard where that decides about residents."""
    found = list[Preset]()
    for one in presets:
        values = one.values
        evicts = values["predictor"] != "none" and values["eviction"] != "none"
        found += [one, guarded(one)] if evicts and not values["prefetch_guard"] else [one]
    return found


@dataclass
class Bench:
    """One run of the bench on a loaded engine, and on one with the same experts in blocks. `generated`: the model was
    written by the bench."""

    run: Run
    engine: Engine
    split: Engine
    generated: bool
    budgets: Sequence[str]
    presets: Sequence[Preset]

    def all(self, rounds: int, tokens: int, questions: int) -> Result:
        """Measures what is not kept yet; the result."""
        engine, profile, about = self.engine, self.profile, self.run.about
        small = "-small" if self.run.small else ""
        file = self.run.folder() / "systems" / f"{engine.model_hash[:16]}{small}.jsonl"
        sizes = {"budgets": list(self.budgets), "sizes": [tokens, questions]}
        computed = {"arithmetic": engine.arithmetic.name, "versions": about["versions"]}
        of = {"model": engine.model_hash, "profile": profile.created, **sizes, **computed}
        kept = KeptRows(file, of)
        self.run.say(f"{len(kept.rows)} measurements are there already")
        link = dict(kept.note("link", self.link, anew=not kept.rows))
        base = engine.settings.with_({**BASE, **link, "predictor": "none", "telemetry": "on"})
        engine.change(dict(base))

        def answers() -> Workload:
            self.run.say("the exact model answers")
            return workload(engine, divided(bundled(engine.model_name))[1], tokens)

        work: Workload = kept.note("workload", answers)
        self.times(kept, base, work, rounds)
        exact = self.quality(kept, base, questions)
        engine.change(dict(base))
        result = {**self.result(kept, work), **self.about(kept, work), "exact_quality": exact}
        kept.done()
        return result

    @cached_property
    def profile(self) -> Profile:
        """The kept profile of this model, completed by what it lacks; gives it to the engine, too."""
        engine, small = self.engine, self.run.small
        file = profile_path(self.run.folder(), f"{engine.model_hash}{'-small' if small else ''}")
        old = load(file, model_hash=engine.model_hash) if file.exists() else None
        parts = {"counts", "times", "curves", *(part for one in self.presets for part in one.needs)} & PARTS.keys()
        lacks = {part for part in parts if old is None or not old.has(part)}
        papers = {name: value for one in self.presets for name, value in one.calibration.items()}
        trained = old.settings.get("estimator") if old is not None else None
        if papers and not (isinstance(trained, dict) and trained.get("quasi")):  # of another kind than the papers'
            lacks.add("estimator")
        if lacks:
            self.run.say(f"calibrating for {', '.join(sorted(lacks))}")
            new = calibrate(
                engine,
                divided(bundled(engine.model_name))[0],
                parts=lacks,
                source="the bundled prompts",
                limit=400 if small else READ,
                settings=CalibrationSettings.checked(**papers),
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
        due = 0.0

        def progress(text: str, share: float) -> None:
            nonlocal due
            if share >= due:
                due = share + 0.1
                self.run.say(f"calibrating, {share:.0%}: {text}")

        return progress

    def link(self) -> dict[str, object]:
        """Settings of the link: the machine's own; where host and device share memory, for the demo model and a
        generated one an emulated link, as slow for them as PCIe is for a large model."""
        engine, times = self.engine, self.profile.times
        if pace := engine.transfers.pace:
            return {"link": "emulated", "link_gbps": pace.gbps, "link_latency_us": pace.latency_us}
        if self.generated and engine.device.type == "cpu" and times is not None:
            return emulated_link(times["att"] + times["moe"], engine.sizes.blob)
        return {"link": "own"}

    def times(self, kept: KeptRows, base: Settings, work: Workload, rounds: int) -> None:
        """Every system at every budget, once a round; what is kept is not measured again."""
        there = {(row["round"], row["budget"], row["system"]) for row in kept.rows if "round" in row}
        for number in self.run.rounds(rounds, warm=False):
            todo: list[tuple[str, str, Mapping[str, object]]] = [("all", RESIDENT, EVERYTHING)]
            for budget in self.budgets:
                turned = [*self.presets[number - 1 :], *self.presets[: number - 1]]
                todo += [(budget, one.name, {**one.values, "budget": budget}) for one in turned]
            for at, (budget, name, settings) in enumerate(todo, 1):
                if (number, budget, name) in there:
                    continue
                row: dict[str, Any] = {"round": number, "budget": budget, "system": name}
                try:
                    row |= (found := measured(self._ready(name, budget, link=base), work, base.with_(settings)))
                    what = f"{found['tpot_ms']:.2f} ms a token, {found['hit_rate'] or 0.0:.1%} hits"
                except MoestroError as error:
                    row["problem"] = what = str(error)
                kept.add(row)
                self.run.say(f"{at} of {len(todo)}: {name} at {budget}: {what}")

    def _ready(self, name: str, budget: str, link: Settings) -> Engine:
        """The engine that runs a system; that of split experts has its configurator's plan for the budget."""
        if not any(one.splits for one in self.presets if one.name == name):
            return self.engine
        engine, curves, times = self.split, self.profile.curves(), self.profile.times
        assert curves is not None and times is not None
        engine.change({**link, "budget": budget, "predictor": "none"})
        load_ms = pace_of(engine).duration_s(self.engine.sizes.blob) * 1e3
        layer = LayerTimes(times["att"], times["moe"], times["head"], load_ms)
        buffer = prefetch_buffer(engine.settings.cache.buffer, engine.shape.top_k, engine.sizes.blocks)
        plan = plan_cache(curves, layer, engine.expert_cache.capacity - buffer)
        engine.use_profile(replace(self.profile, plan=plan))
        return engine

    def quality(self, kept: KeptRows, base: Settings, questions: int) -> dict[str, Any] | None:
        """Evaluates the systems that change answers at every budget; returns the exact model's own figures, None where
        every system is exact."""
        lossy = [one for one in self.presets if Settings(one.values).lossy.active]
        if not lossy:
            return None
        engine = self.engine
        there = {(row["mode"], row["at"]) for row in kept.rows if "mode" in row}
        material = gather(engine, questions, 8 if self.run.small else TEXT)
        exact = next(mode for mode in PLAIN if mode.name == "exact")
        engine.change(dict(base))
        for budget in self.budgets:
            modes = [Mode(one.name, one.title, one.about, one.values) for one in lossy]
            modes += [exact] if budget == self.budgets[0] else []
            share = engine.sizes.slots(Budget.parse(budget)) / engine.sizes.slots_all
            for mode in modes:
                if (mode.name, budget) in there or not 0 < share <= 1:
                    continue
                self.run.say(f"quality of {mode.title} at {budget}")
                [row] = evaluate(engine, [mode], [share], material)
                figures = {name: getattr(row, name) for name in (*QUALITY, "questions", "positions", "problem")}
                kept.add({"mode": mode.name, "at": budget, **figures})
        return next((judged(row) for row in kept.rows if row.get("mode") == "exact"), None)

    def result(self, kept: KeptRows, work: Workload) -> Result:
        """The figures of each system at each budget, and the bounds."""
        engine, profile = self.engine, self.profile
        qualities = {(row["mode"], row["at"]): judged(row) for row in kept.rows if "mode" in row}
        resident = median_round([row for row in kept.rows if row.get("system") == RESIDENT])
        resident_ms, sizes = resident.get("tpot_ms"), engine.sizes
        pace = pace_of(engine)
        load_ms = pace.duration_s(sizes.blob) * 1e3
        clock = clock_of(profile, resident_ms, load_ms) if resident_ms is not None else None
        with tempfile.TemporaryDirectory() as folder:
            trace = recorded(engine, work, Path(folder) / "routing.trace")
            limits = {
                budget: bounds(trace, slots, usual(profile), resident_ms, pace, sizes.blob, clock)
                for budget, slots in self._slots()
            }

        def system(name: str, at: str) -> dict[str, Any]:
            rows = [row for row in kept.rows if (row.get("system"), row.get("budget")) == (name, at)]
            return {**median_round(rows), "quality": qualities.get((name, at))}

        return {
            "resident": resident,
            "bounds": limits,
            "systems": {one.name: {at: system(one.name, at) for at in self.budgets} for one in self.presets},
            "units": {
                "ttft_ms": "ms",
                "tpot_ms": "ms",
                **{name: f"{one.unit} per token" for name, one in BY_NAME.items() if name in resident},
                **{name: FIGURES[name][0] for name in QUALITY},
                "hit_rate": "share",
            },
        }

    def about(self, kept: KeptRows, work: Workload) -> Result:
        """What was measured on."""
        sizes, profile, manifest = self.engine.sizes, self.profile, self.engine.manifest()
        return {
            "expert_bytes": sizes.blob,
            **{name: manifest[name] for name in manifest if name.startswith("link")},
            "budgets": {
                budget: {"slots": slots, "share": slots / sizes.slots_all, "bytes": sizes.bytes(slots)}
                for budget, slots in self._slots()
            },
            "rounds": max((row["round"] for row in kept.rows if "round" in row), default=0),
            "tokens": sum(len(answer) - 1 for _, answer in work),
            "prompts": len(work),
            "profile": {"tokens": profile.tokens, "source": profile.source, "created": profile.created},
            "titles": {one.name: one.title for one in self.presets},
        }

    def _slots(self) -> Iterator[tuple[str, int]]:
        return ((budget, self.engine.sizes.slots(Budget.parse(budget))) for budget in self.budgets)


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 12, "questions": 2})
