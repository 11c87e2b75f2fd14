"""bench split: where does it pay to keep a part of every expert instead of whole ones (MoEpic)?

Two engines over one model stay loaded: one with whole experts, one with experts in blocks. Both read the same prompts
and give the same answers within the same budget, over emulated links of three speeds and out of packs on disk: plain
caches of whole experts; of split experts the same part of every one, from none to all; and MoEpic with the plan of its
configurator and its ablations. The table has what the plan's latency model expected, too."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from bench.harness.engines import blocks_of, divided, emulated_link, model_of, pace_of, pack_of
from bench.harness.run import Result, Run, Suite
from bench.harness.workload import Workload, median_round, play, workload
from bench.speed.split_result import table
from core.engine import Engine
from core.engine.texts import bundled
from core.errors import MoestroError
from core.measure.calibrate.gather import calibrate
from core.measure.evaluate.run import start_mode
from core.memory.link import LOAD_TO_LAYER
from core.policy.allocation.cache_plan import CachePlan
from core.policy.allocation.configurator import WHOLE, plan_cache, plan_even
from core.policy.allocation.curves import Curves
from core.policy.allocation.expert_split import LayerTimes
from core.policy.allocation.slot_allocation import prefetch_buffer
from core.profile import Profile
from core.settings.config import Settings
from core.settings.presets import SPECULATIVE, preset

LINKS = {"slow": 2.0, "usual": 1.0, "fast": 0.5}  # times the copy that a layer of the reference machine waits for
DISK = "disk"
READ = 4000  # tokens that calibration reads
BASE = {"telemetry": "on", "scope": "layer", "bypass": False, "pins": ""}
PLAIN: dict[str, dict[str, object]] = {
    "lru": {"eviction": "lru", "predictor": "none"},
    "lru_gate": {"eviction": "lru", "predictor": "gate"},
    "lcp_gate": dict(preset("moepic").values),
}
THETA = "split.uniform.theta"
LOADS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)  # copies over layers, and budgets ...
SHARES = (0.1, 0.2, 0.35, 0.5, 0.75)  # for which the latency model is evaluated
APART: dict[str, dict[str, Any]] = {"whole": {}, "split": {"split": "uniform", THETA: 1.0}}  # blocks not joined
ZETAS = (0.01, 0.02, 0.05, 0.1)
NOTHING = 1e-9  # a part that is none, to the configurator
PLANNED = ("moepic_split", "moepic_random_prefetch", "moepic_random_eviction")


class Row(NamedTuple):
    """One configuration: an engine's name, and settings."""

    name: str
    engine: str  # "whole" or "split"
    settings: Mapping[str, object]


def measure(run: Run, model: str = "demo", budget: str = "20%", rounds: int = 5, tokens: int = 200) -> Result:
    """`budget` is a share of the experts, the buffer included; `tokens` = decoded tokens of a run."""
    path = model_of(run, model)
    blocks = blocks_of(path, run.small)
    counts = {"whole": 1, "split": blocks}
    packs = {name: str(pack_of(run, path, f"{name}{count}", blocks=count)) for name, count in counts.items()}
    found: dict[str, Any] = {}
    with _engines(run, dict.fromkeys(packs, path), blocks, budget) as engines:
        bench = Bench(run, engines, rounds, budget)
        bench.prepare(tokens, 400 if run.small else READ)
        for name, times in LINKS.items():
            found[name] = bench.over(bench.emulated(times), name)
        about = {**bench.about(), "expected": bench.expected()}
    with _engines(run, packs, blocks, budget, host="none") as engines:
        found[DISK] = replace(bench, engines=engines).over({"link": "own"}, DISK)
    return {**about, "model": run.about["model"], "blocks": blocks, "links": found}


@contextmanager
def _engines(
    run: Run, models: Mapping[str, str], blocks: int, budget: str, host: str = "auto"
) -> Iterator[dict[str, Engine]]:
    """One with whole experts and one with experts in blocks."""
    settings = {**BASE, "budget": budget, "link": "own"}
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                run.loaded(model, settings, context=512, host=host, blocks=blocks if name == "split" else 1)
            )
            for name, model in models.items()
        }


@dataclass
class Bench:
    """One run over two loaded engines, "whole" and "split"."""

    run: Run
    engines: Mapping[str, Engine]
    rounds: int
    budget: str
    work: Workload = ()
    profile: Profile | None = None
    resident_ms: Mapping[str, float] | None = None  # a token with everything resident, by engine
    predict_ms: float = 0.0  # of a token, what predicting takes the computing thread

    def prepare(self, tokens: int, read: int) -> None:
        """The answers, the profile, and the time of a token where nothing has to be copied."""
        whole = self.engines["whole"]
        texts, asked = divided(bundled(whole.model_name))
        self.run.say("the model answers")
        self.work = workload(whole, asked, tokens)
        self.run.say("calibrating")
        self.profile = calibrate(whole, texts, parts={"counts", "curves", "times"}, limit=read, source="bench split")
        self.resident_ms = {}
        for name, engine in self.engines.items():
            all_of_it = {**BASE, "budget": "all", "predictor": "none", "link": "own", **APART[name]}
            start_mode(engine, engine.settings.with_(all_of_it))
            seen = [float(play(engine, self.work).figures()["compute_ms"]) for _ in range(1 + self.rounds)][1:]
            self.resident_ms[name] = median(seen)
            engine.change({"budget": self.budget})
            self.run.say(f"{name}: {self.resident_ms[name]:.2f} ms a token with everything resident")
        split = self.engines["split"]
        start_mode(split, split.settings.with_({**preset("moepic_half").values, **BASE, "link": "own"}))
        self.predict_ms = median(float(play(split, self.work).figures()["predict_ms"]) for _ in range(self.rounds))

    def emulated(self, times: float) -> dict[str, object]:
        """A link on which an expert's copy takes `times` as long, in layers, as on the reference machine."""
        whole, resident = self.engines["whole"], self.resident_ms
        assert resident is not None
        return emulated_link(times * resident["whole"] / whole.shape.layers, whole.sizes.blob)

    def over(self, link: Mapping[str, object], called: str) -> dict[str, Any]:
        """Every configuration over one link, once a round."""
        split, profile = self.engines["split"], self.profile
        assert profile is not None
        for engine in self.engines.values():
            engine.change(dict(link))
        load_ms = self._load_ms()
        planned = self._planned(load_ms)
        plan, blocks = plan_cache(*planned), split.loaded.plan.codecs.blocks
        even = {n / blocks: plan_even(*planned, n / blocks or NOTHING) for n in range(blocks + 1)}
        for engine in self.engines.values():
            engine.use_profile(replace(profile, plan=plan))
        rows = [Row(name, "whole", {**Settings(), **settings}) for name, settings in PLAIN.items()]
        rows += [
            Row(f"theta {theta:.2f}", "split", {**SPECULATIVE, "eviction": "lcp", "split": "uniform", THETA: theta})
            for theta in even
        ]
        rows += [Row(name, "split", preset(name).values) for name in PLANNED]
        by_name = {row.name: row for row in rows}

        def one(name: str, number: int) -> dict[str, Any]:
            return {**self._measured(by_name[name], link), "round": number}

        seen = self.run.by_turns([*by_name], one, self.rounds, warm=False, what=called)
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
        return pace_of(whole).duration_s(whole.sizes.blob) * 1e3

    def _planned(self, load_ms: float) -> tuple[Curves, LayerTimes, int]:
        """What plans follow from: hit curves, the times of the engine in blocks and its predictor, and how many experts
        fit, the buffer not counted."""
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
                row = {"share": share, "load": load, "whole_ms": whole.tpot_ms, "plan_ms": plan.tpot_ms, "theta": theta}
                found.append(row)
        return found

    def about(self) -> dict[str, Any]:
        """What was measured on."""
        return {
            "expert_bytes": self.engines["whole"].sizes.blob,
            "tokens": sum(len(answer) - 1 for _, answer in self.work),
            "resident_ms": dict(self.resident_ms or {}),
            "predict_ms": self.predict_ms,
            "load_to_layer": LOAD_TO_LAYER,
        }


def judged(rows: Mapping[str, Mapping[str, Any]], plans: Mapping[str, CachePlan]) -> dict[str, Any]:
    """Whether splitting pays: MoEpic against the best plain cache, the best part, and predictions over what was
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


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 12, "budget": "75%"})
