"""Try every method that settings choose among with one loaded model: a profile, evaluation, plans, each variant in the
registry, each way to be lossy, drafts. What is registered later is tried as well."""

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from core.capacity.fit import fit_of
from core.engine import Engine
from core.errors import MoestroError
from core.measure.calibrate.gather import calibrate
from core.measure.evaluate.modes import chosen
from core.measure.evaluate.questions import FactQuestion
from core.measure.evaluate.run import evaluate, gather
from core.policy.allocation.configurator import plan_cache
from core.policy.allocation.expert_split import LayerTimes
from core.profile import PARTS, Profile, load, save
from core.settings.calibration import CalibrationSettings
from core.settings.config import KINDS, Settings, general
from core.settings.drafts import DraftSettings
from core.settings.lossy import EXACT, LossySettings
from core.settings.param import Value
from core.settings.registry import same_as, variants
from tests.architectures.turns import said
from tests.loaded import loaded

YES = "yes"
FAILS = "fails: "  # how a cell begins that is neither this nor the engine's own words
TEXTS = ["Nothing is fetched that is there already.", "A text in another tongue: pane, pain, Brot."]
SHORT = CalibrationSettings.checked(
    estimator_width=8, estimator_tokens=64, path_texts="read", path_tokens=64, path_answer=8
)
ASKED = [FactQuestion("Where does the ferry go?", "home", True), FactQuestion("What is bread?", "pain", False)]
STEPS, MORE = 2, 16  # tokens of an answer, and where so few show nothing
TOKENS = 12  # of a text, that each mode of an evaluation decodes
MODES = "exact,random,drop_rho1_tae,paper_95_16_rho3,verify,execute_gate"  # others have the same parts
HOW: Mapping[str, object] = {"dtype": "float32", "context": 256, "sequences": 3}
FAST = " (fast)"  # a mark after names
TRIED = [kind for kind in KINDS if not same_as(kind) and kind != "substitute"]  # these change no bit
COLUMNS = ("calibration", "plan", "evaluation", *TRIED, "lossy", "drafts")
IN_REFERENCE = ("calibration", "plan", *[kind for kind in TRIED if kind != "split"])

Cells = dict[str, str]


def try_methods(path: str) -> dict[str, Cells]:
    """What is found of a checkpoint's model, by column and method: `YES`, or words that say what happens instead. Those
    that change no bit are tried in the reference arithmetic, prefetchers in the fast one as well, where it computes at
    least the experts, and the others in that; those for parts of experts with experts in two blocks."""
    found: dict[str, Cells] = {column: {} for column in COLUMNS}

    def note(engine: Engine, columns: Sequence[str], mark: str = "") -> None:
        for column, cells in Trial(engine).columns(columns).items():
            found[column] |= {name + mark: cell for name, cell in cells.items()}

    with loaded(path, {}, **HOW, arithmetic="reference") as engine:
        note(engine, IN_REFERENCE)
        profile = engine.parts.prediction.predictor_host.profile
        assert profile is None or isinstance(profile, Profile)
    with loaded(path, {}, **HOW, arithmetic="fast") as engine:
        engine.use_profile(profile)
        note(engine, ["predictor"] if engine.arithmetic.fast else [], FAST)
        note(engine, ["lossy", "drafts", "evaluation"])
    with loaded(path, {}, **HOW, arithmetic="fast", blocks=2) as engine:
        engine.use_profile(profile)
        note(engine, ["split"])
    return found


def tried(trial: Callable[[], str]) -> str:
    """What it finds, or what the engine says instead. Any error that is not the project's own is a failure."""
    try:
        return trial()
    except MoestroError as error:
        return str(error)
    except Exception as error:
        return f"{FAILS}stops with {type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"


class Trial:
    """Of one loaded engine."""

    def __init__(self, engine: Engine, at: int = 0, of: int = 1) -> None:
        """Of all methods of a column those that are `at` modulo `of`."""
        engine.prompt.ends = set()  # no answer is to be shorter than another
        self.engine, shape, self._dealt = engine, engine.shape, slice(at, None, of)
        share = min(1.0, (shape.top_k + 1) / shape.experts)  # in each layer one expert more than a token needs
        self.start = dict(Settings({"budget": f"{100 * share}%", "prefetch_guard": False}))
        engine.change(self.start | {"budget": "100%"})
        self.wanted = said(engine)
        engine.change(self.start)

    def columns(self, columns: Sequence[str]) -> dict[str, Cells]:
        """What is found, by column and method."""
        found: dict[str, Cells] = {}
        if "calibration" in columns:
            found["calibration"] = {"profile": tried(self._calibrated)}
            found["plan"] = {"fit": tried(self._fits), "cache": tried(self.planned)}
        for kind in TRIED:
            names = [one.name for one in variants(kind)][self._dealt] if kind in columns else []
            found[kind] = {name: tried(lambda to={kind: name}: self.same(to)) for name in names}
        if "lossy" in columns:
            found["lossy"] = {named(to): tried(lambda to=to: self._lossy(to)) for to in lossy_changes()[self._dealt]}  # type: ignore[misc]
            found["lossy"]["exact again"] = tried(lambda: self.same({}))
        if "drafts" in columns:
            sources = [one for one in general(DraftSettings)["drafts"].choices if DraftSettings(one).by_lookup]  # type: ignore[arg-type]
            found["drafts"] = {name: tried(lambda to=name: self._drafts(to)) for name in sources}  # type: ignore[misc]
        if "evaluation" in columns:
            self.engine.change(self.start)
            found["evaluation"] = self._evaluated()
        return {column: cells for column, cells in found.items() if column in columns}

    def _calibrated(self) -> str:
        """Have a profile with every part in use that comes back from its file."""
        profile = calibrate(self.engine, TEXTS, parts=set(PARTS), settings=SHORT)
        with tempfile.TemporaryDirectory() as folder:
            save(profile, Path(folder) / "profile")
            back = load(Path(folder) / "profile", model_hash=self.engine.model_hash)
        self.engine.use_profile(back)
        lacking = [name for name in PARTS if not back.has(name)]
        return f"without {', '.join(lacking)}" if lacking else YES

    def _fits(self) -> str:
        """Whether the fit card says of a load what the load is."""
        fit, memory, sizes = fit_of(self.engine.loaded.plan), self.engine.memory(), self.engine.sizes
        if fit.problem:
            return fit.problem
        planned = sizes.slots(self.engine.loaded.plan.spec.settings.cache.budget)
        if (fit.slots * sizes.blocks, fit.dense) != (planned, memory.dense) or fit.tok_s_low <= 0:
            return f"{FAILS}planned {fit.slots, fit.dense}, is {planned, memory.dense}"
        return YES

    def planned(self) -> str:
        """Have MoEpic's plan in the profile in use, for the variants that need one."""
        profile, shape = self.engine.parts.prediction.predictor_host.profile, self.engine.shape
        if not isinstance(profile, Profile):
            self.engine.change({**self.start, "layer_slots": "moepic"})  # is refused, with the reason
            return f"{FAILS}a plan without a profile"
        curves = profile.curves()
        if curves is None or profile.times is None:
            return "nothing was measured to plan from"
        if profile.gate_recall is not None:
            curves = curves.with_recall(profile.gate_recall)
        plan = plan_cache(curves, LayerTimes.of(profile.times), 0.625 * shape.layers * shape.experts)
        self.engine.use_profile(replace(profile, plan=plan))
        return YES

    def same(self, changes: Mapping[str, Value]) -> str:
        """Whether two turns and a batch have the bits that they have with every expert resident."""
        engine = self.engine
        engine.change({**self.start, **changes})
        got = said(engine)
        engine.expert_cache.check_integrity()
        if engine.memory().used > engine.memory().budget:
            return f"{FAILS}exceeds the budget"
        if not all(got.exact):
            return f"{FAILS}says that it is not exact"
        idle = not any(step.prefetch_issued for step in got.steps)
        if idle and changes.get("predictor", "none") != "none" and not _answers_late(engine):
            engine.keep(probs=False, ranks=True, tokens=False)  # all that it named may be resident
            steps = said(engine).steps
            engine.keep(probs=False, ranks=False, tokens=False)
            if not any(step.ranked is not None and step.ranked.size for step in steps):
                return f"{FAILS}names no expert"
        return f"{FAILS}{where}" if (where := got.differs(self.wanted)) else YES

    def _lossy(self, changes: Mapping[str, str]) -> str:
        """Whether it acts, is counted, called inexact and scored."""
        engine = self.engine
        engine.change({**self.start, "quality_rate": 1.0, "execute_share": 0.3, **changes})
        for steps in (STEPS, MORE):  # more, if nothing was missing that could be replaced
            got = said(engine, steps=steps)
            if not all(step.lossless for step in got.steps):
                break
        else:
            return f"{FAILS}changes nothing"
        engine.expert_cache.check_integrity()
        if all(got.exact):
            return f"{FAILS}says that it is exact"
        if any(logits.isnan().any() for logits in got.logits):
            return f"{FAILS}computes no numbers"
        scored = next((one for one in iter(engine.audit, None) if one is not None and one.kl is not None), None)
        if scored is None or not math.isfinite(scored.kl or 0.0):
            return f"{FAILS}none of its answers is scored"
        return YES

    def _drafts(self, source: str) -> str:
        """Whether verified tokens have the bits of those computed alone; or why there are none."""
        told, drafter = list[str](), self.engine.parts.drafter
        say, drafter.say = drafter.say, told.append
        try:
            found = self.same({"drafts": source})
        finally:
            drafter.say = say
        return found if found != YES or not told else told[-1]

    def _evaluated(self) -> Cells:
        """What each mode of an evaluation says, on tokens of a text and on questions."""
        found: Cells = {}
        for what, figure in (("text", "kl"), ("questions", "exact_match")):

            def trial(what: str = what, figure: str = figure) -> str:
                asked = (0, TOKENS) if what == "text" else (len(ASKED), 0)
                share = self.engine.expert_cache.capacity / self.engine.sizes.slots_all
                for row in evaluate(self.engine, chosen(MODES), [share], gather(self.engine, *asked, ASKED)):
                    value = getattr(row, figure)
                    lost = value is None or not math.isfinite(value)
                    if row.problem or lost:
                        found[f"{row.mode} {what}"] = row.problem or f"{FAILS}without {figure}"
                return YES

            found[what] = tried(trial)
        return found


def _answers_late(engine: Engine) -> bool:
    """Whether its predictor asks a process, for which nothing waits where a pass takes a millisecond and no module of
    the model's is called."""
    return engine.arithmetic.fast and getattr(engine.predictor_host.predictor, "worker", None) is not None


def lossy_changes() -> list[dict[str, str]]:
    """Each way to be lossy: one of `miss` with each substitute, where it substitutes, or executing what each predictor
    that can be executed named."""
    known = general(LossySettings)
    able = [one.name for one in variants("predictor") if getattr(one.make, "executes", False)]
    found = list[dict[str, str]]()
    for miss in known["miss"].choices:
        if LossySettings(miss=miss).substitutes:  # type: ignore[arg-type]
            for one in variants("substitute"):
                by = {"predictor": able[-1]} if getattr(one.make, "named", False) else {}
                found.append({"miss": miss, "substitute": one.name, **by})
        elif miss != EXACT["miss"]:
            found.append({"miss": miss})
    ways = [way for way in known["execute"].choices if way != EXACT["execute"]]
    return found + [{"execute": way, "predictor": name} for way in ways for name in able]


def named(change: Mapping[str, str]) -> str:
    """A way to be lossy, in few words: "substitute buddy"."""
    way, by = change.get("miss") or change["execute"], change.get("substitute") or change.get("predictor", "")
    return f"{way} {by}".strip()
