"""bench split: where does it pay to keep a part of every expert instead of whole ones (MoEpic)?

Two engines over one model stay loaded: one with whole experts, one with experts in blocks. Both read the same prompts
and give the same answers within the same budget, over emulated links of three speeds and out of packs on disk: plain
caches of whole experts; of split experts the same part of every one, from none to all; and MoEpic with the plan of its
configurator and its ablations. What the plan's latency model expected stands beside what was measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.generate import FULL, SMALL, checkpoint
from bench.predictors import divided
from bench.split_table import table
from bench.subject import subject
from bench.systems_measure import Workload, median_round, play, workload
from core.calibrate.gather import calibrate
from core.calibrate.texts import bundled
from core.engine import Engine
from core.errors import MoestroError
from core.evaluate.run import start_mode
from core.importing import import_model
from core.memory.link import LOAD_TO_LAYER, scaled_gbps
from core.memory.pack import pack_at
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, plan_cache, plan_even
from core.policy.allocation.curves import Curves
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import Profile
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.presets import SPECULATIVE, preset

__all__ = ["run", "table"]

GENERATED = "generated"
BLOCKS = {"demo": 3}  # of other models 4
LINKS = {"slow": 2.0, "usual": 1.0, "fast": 0.5}  # times the copy that a layer of the reference machine waits for
DISK = "disk"
LATENCY_US = 10.0
READ = 4000  # tokens that calibration reads
BASE = {"telemetry": True, "scope": "layer", "bypass": False, "pins": ""}
PLAIN: dict[str, dict[str, object]] = {
    "lru": {"eviction": "lru", "predictor": "none"},
    "lru_gate": {"eviction": "lru", "predictor": "gate"},
    "lcp_gate": dict(preset("moepic").values),
}
THETA = "split.uniform.theta"
LOADS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # and budgets ...
SHARES = (0.1, 0.2, 0.35, 0.5, 0.75)  # that the latency model is asked about
APART: dict[str, dict[str, Any]] = {"whole": {}, "split": {"split": "uniform", THETA: 1.0}}  # blocks not joined
ZETAS = (0.01, 0.02, 0.05, 0.1)
NOTHING = 1e-9  # a part that is none, to the configurator
PLANNED = ("moepic_split", "moepic_random_prefetch", "moepic_random_eviction")


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration: an engine's name, and settings."""

    name: str
    engine: str  # "whole" or "split"
    settings: Mapping[str, object]


def run(
    keep: Path,
    model: str = "demo",
    budget: str = "20%",
    rounds: int = 3,
    tokens: int = 96,
    small: bool = False,
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. `keep` = the folder for a generated model and the packs; `budget` is
    a share of the experts, the buffer included; `tokens` = decoded tokens of a run."""
    if small:
        rounds, tokens = 1, 12
    if model == GENERATED:
        model = str(checkpoint(keep, SMALL if small else FULL, say=say))
    blocks = BLOCKS.get(model, 2 if small else 4)
    budget = "75%" if small else budget
    with tempfile.TemporaryDirectory() as made:
        packs = _packs(model, keep if model != "demo" else Path(made), blocks, say)
        found: dict[str, Any] = {}
        with _engines(dict.fromkeys(packs, model), blocks, budget, say) as engines:
            bench = Bench(engines, rounds, budget, say)
            bench.prepare(tokens, 400 if small else READ)
            for name, times in LINKS.items():
                found[name] = bench.over(bench.emulated(times), name)
            about = {**bench.about(), "expected": bench.expected()}
        with _engines(packs, blocks, budget, say, host="none") as engines:
            found[DISK] = replace(bench, engines=engines).over({"link": "own"}, DISK)
    return {**about, "blocks": blocks, "budget": budget, "rounds": rounds, "links": found}


def _packs(model: str, keep: Path, blocks: int, say: Callable[[str], None]) -> dict[str, str]:
    """The model as a pack of whole experts, and as one of experts in blocks; imported if they are not there yet."""
    found: dict[str, str] = {}
    for name, count in (("whole", 1), ("split", blocks)):
        pack = keep / f"{Path(model).name}.{name}{count}.pack"
        if not pack_at(pack):
            say(f"importing {pack.name}")
            import_model(model, pack, blocks=count)
        found[name] = str(pack)
    return found


@contextmanager
def _engines(
    models: Mapping[str, str], blocks: int, budget: str, say: Callable[[str], None], host: str = "auto"
) -> Iterator[dict[str, Engine]]:
    with ExitStack() as stack:
        engines: dict[str, Engine] = {}
        for name, model in models.items():
            say(f"loading {Path(model).name} with {name} experts")
            settings = Settings({**BASE, "budget": budget, "link": "own"})
            spec = LoadSpec.checked(model, settings, context=512, host=host, blocks=blocks if name == "split" else 1)
            engines[name] = stack.enter_context(_loaded(spec))
        yield engines


@contextmanager
def _loaded(spec: LoadSpec) -> Iterator[Engine]:
    engine = Engine.load(spec)
    try:
        yield engine
    finally:
        engine.unload()


@dataclass
class Bench:
    """One run over two loaded engines, "whole" and "split"."""

    engines: Mapping[str, Engine]
    rounds: int
    budget: str
    say: Callable[[str], None]
    work: Workload = ()
    profile: Profile | None = None
    resident_ms: Mapping[str, float] | None = None  # a token with everything resident, by engine
    predict_ms: float = 0.0  # of a token, what predicting takes the computing thread

    def prepare(self, tokens: int, read: int) -> None:
        """The answers, the profile, and the time of a token where nothing has to be copied."""
        whole = self.engines["whole"]
        asked, texts = divided(bundled(whole.model_name))[::-1]
        self.say("the model answers")
        self.work = workload(whole, asked, tokens)
        if not self.work:
            raise MoestroError("The model gives no answers to the prompts, so there is nothing to measure.")
        self.say("calibrating")
        self.profile = calibrate(whole, texts, parts={"counts", "curves", "times"}, limit=read, source="bench split")
        self.resident_ms = {}
        for name, engine in self.engines.items():
            all_of_it = {**BASE, "budget": "all", "predictor": "none", "link": "own", **APART[name]}
            start_mode(engine, engine.settings.with_(all_of_it))
            seen = [float(play(engine, self.work).figures()["compute_ms"]) for _ in range(1 + self.rounds)][1:]
            self.resident_ms[name] = median(seen)
            engine.change({"budget": self.budget})
            self.say(f"{name}: {self.resident_ms[name]:.2f} ms a token with everything resident")
        split = self.engines["split"]
        start_mode(split, split.settings.with_({**preset("moepic_half").values, **BASE, "link": "own"}))
        self.predict_ms = median(float(play(split, self.work).figures()["predict_ms"]) for _ in range(self.rounds))

    def emulated(self, times: float) -> dict[str, object]:
        """A link on which an expert's copy takes `times` as long as on the reference machine, beside a layer."""
        whole, resident = self.engines["whole"], self.resident_ms
        assert resident is not None
        layer_ms = times * resident["whole"] / whole.shape.layers
        gbps = scaled_gbps(layer_ms, whole.sizes.blob, LATENCY_US)
        return {"link": "emulated", "link_gbps": gbps, "link_latency_us": LATENCY_US}

    def over(self, link: Mapping[str, object], called: str) -> dict[str, Any]:
        """Every configuration over one link, once a round."""
        split, profile = self.engines["split"], self.profile
        assert profile is not None
        for engine in self.engines.values():
            engine.change(dict(link))
        load_ms = self._load_ms()
        planned = self._planned(load_ms)
        plan, blocks = plan_cache(*planned), split.loaded.plan.codec.blocks
        even = {n / blocks: plan_even(*planned, n / blocks or NOTHING) for n in range(blocks + 1)}
        for engine in self.engines.values():
            engine.use_profile(replace(profile, plan=plan))
        rows = [Row(name, "whole", {**Settings(), **settings}) for name, settings in PLAIN.items()]
        rows += [
            Row(f"theta {theta:.2f}", "split", {**SPECULATIVE, "eviction": "lcp", "split": "uniform", THETA: theta})
            for theta in even
        ]
        rows += [Row(name, "split", preset(name).values) for name in PLANNED]
        seen: dict[str, list[dict[str, Any]]] = {row.name: [] for row in rows}
        for number in range(self.rounds):
            for row in (*rows[number:], *rows[:number]):
                seen[row.name].append({**self._measured(row, link), "round": number + 1})
                self.say(f"{called}, round {number + 1} of {self.rounds}, {row.name}: {_said(seen[row.name][-1])}")
        found = {name: median_round(several) for name, several in seen.items()}
        return {
            "gbps": link.get("link_gbps"),
            "load_ms": load_ms,
            "emulated": link["link"] == "emulated",
            "rows": found,
            "plan": plan.as_json(),
            "zeta": {str(zeta): plan_cache(*planned, zeta=zeta).tpot_ms for zeta in ZETAS},
            "tops": [one.top for one in plan.in_blocks(blocks)],
            **judged(found, {"moepic_split": plan} | {f"theta {theta:.2f}": one for theta, one in even.items()}),
        }

    def _measured(self, row: Row, link: Mapping[str, object]) -> dict[str, Any]:
        engine = self.engines[row.engine]
        try:
            start_mode(engine, engine.settings.with_({**row.settings, **BASE, **link, "budget": self.budget}))
            steps = play(engine, self.work)
        except MoestroError as error:
            return {"problem": str(error)}
        decode = [step for step in steps.steps if step.phase == "decode"]
        tops = sum(step.top_hits for step in decode) / sum(step.tokens for step in decode)
        return {**steps.figures(), "top_hits": tops}

    def _load_ms(self) -> float:
        """Copying one whole expert over the link in force."""
        whole = self.engines["whole"]
        pace, link_gbps = whole.transfers.pace, whole.parts.memory.link_gbps
        return (pace.duration_s(whole.sizes.blob) if pace else whole.sizes.blob / (link_gbps * 1e9)) * 1e3

    def _planned(self, load_ms: float) -> tuple[Curves, LayerTimes, int]:
        """What plans follow from: hit curves, the times of the engine in blocks and its predictor, and experts beside
        the buffer."""
        engine, profile, resident = self.engines["split"], self.profile, self.resident_ms
        assert profile is not None
        assert resident is not None
        curves, measured = profile.curves(), profile.times
        assert curves is not None
        assert measured is not None
        moe_ms = (resident["split"] - measured["head"]) / engine.shape.layers - measured["att"]
        att_ms = measured["att"] + self.predict_ms / engine.shape.layers
        times = LayerTimes(att_ms, max(moe_ms, 1e-3), measured["head"], load_ms)
        buffer = prefetch_buffer(engine.settings.cache.buffer, engine.shape.top_k, engine.sizes.blocks)
        return curves, times, engine.expert_cache.capacity - buffer

    def expected(self) -> list[dict[str, float]]:
        """What the latency model expects of even caches of whole experts and of the plan, both with MoEpic's
        prefetches: at budgets in shares of the experts, with an expert's copy `load` times as long as a layer."""
        curves, times, _ = self._planned(0.0)
        found = []
        for share in SHARES:
            experts = share * curves.layers * curves.experts
            for load in LOADS:
                asked = replace(times, load_ms=load * (times.att_ms + times.moe_ms))
                whole, plan = plan_even(curves, asked, experts, WHOLE), plan_cache(curves, asked, experts)
                theta = sum(plan.theta) / len(plan.theta)
                found.append(
                    {"share": share, "load": load, "whole_ms": whole.tpot_ms, "plan_ms": plan.tpot_ms, "theta": theta}
                )
        return found

    def about(self) -> dict[str, Any]:
        """What was measured on."""
        engine = self.engines["whole"]
        return {
            **subject(engine),
            "expert_bytes": engine.sizes.blob,
            "tokens": sum(len(answer) - 1 for _, answer in self.work),
            "resident_ms": dict(self.resident_ms or {}),
            "predict_ms": self.predict_ms,
            "threads": torch.get_num_threads(),
            "load_to_layer": LOAD_TO_LAYER,
        }


def judged(rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, CachePlan]) -> dict[str, Any]:
    """Whether splitting pays: MoEpic beside the best plain cache, the best part, and predictions over what was
    measured."""
    ms = {name: row["tpot_ms"] for name, row in rows.items() if "tpot_ms" in row}
    plain = {name: ms[name] for name in PLAIN if name in ms}
    thetas = {name: value for name, value in ms.items() if name.startswith("theta")}
    best, full = min(plain, key=plain.__getitem__, default=None), ms.get("moepic_split")
    optimum = min(thetas, key=thetas.__getitem__, default=None)
    return {
        "best_plain": best,
        "gain": None if best is None or full is None else plain[best] / full,
        "gain_of_best_theta": None if best is None or optimum is None else plain[best] / thetas[optimum],
        "best_theta": None if optimum is None else float(optimum.removeprefix("theta ")),
        "inner_optimum": None if optimum is None else optimum not in (min(thetas), max(thetas)),
        "predicted_over_measured": {name: plan.tpot_ms / ms[name] for name, plan in plans.items() if name in ms},
    }


def _said(found: Mapping[str, Any]) -> str:
    if "problem" in found:
        return str(found["problem"])
    return f"{found['tpot_ms']:.2f} ms a token, {found['stall_ms']:.2f} of it waiting"
