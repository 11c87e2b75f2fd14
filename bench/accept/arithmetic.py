"""Check of `launch.py accept`: the fast arithmetic on this GPU. Its bits against this CPU's, and milliseconds a token
and a prompt against the reference's."""

import statistics
from typing import Any

import torch

from bench.accept.drawn import Subject, dense_only, one_expert
from bench.accept.engines import Text, drawn, load, talk
from bench.accept.link import Wrong
from bench.models.generate import checkpoint
from core.engine import Engine
from core.errors import BudgetError, SettingError
from core.settings.sampling import Sampling
from core.system.native.compile import supported
from core.types import Ids

FORMATS = ("int4-g64", "int8", "mxfp4", "checkpoint")
CPU = torch.device("cpu")
PROMPT, SAID = 100, 48  # tokens of the text whose logits are compared
FEW = "20%"  # of the experts
WAYS: dict[str, dict[str, object]] = {  # in which a token's experts are found; each gets the same bits
    "host": {"gpu_decode": "host", "miss_placement": "wait"},
    "misses_on_the_host": {"gpu_decode": "host", "miss_placement": "host"},
    "graph": {"gpu_decode": "graph", "miss_placement": "wait"},
}
ARITHMETICS = ("reference", "fast")
BUDGETS = ("all", "35%", "15%")
LENGTHS = (64, 400)  # tokens of prompts that are timed


def fast(subject: Subject) -> dict[str, Any]:
    """The same bits by format, budget and way; then times of both arithmetics."""
    found, model = subject.report(), str(checkpoint(subject.folder / "different", subject.different))
    for name in found.in_time(FORMATS[:1] if subject.small else FORMATS):
        found[name] = _bits(subject, model, name)
    return {**found, **_speed(subject)}


def _loaded(
    model: str, device: torch.device, arithmetic: str, settings: dict[str, object], **choices: object
) -> Engine:
    """An engine in this arithmetic. Raises Wrong where another one computes."""
    engine = load(
        model, device, 1024, {"eviction": "lru", "predictor": "none"} | settings, arithmetic=arithmetic, **choices
    )
    if engine.arithmetic.name != arithmetic:
        reason = engine.arithmetic.fallback
        engine.unload()
        raise Wrong(f"on the {device.type.upper()} {arithmetic} became {engine.arithmetic.name}: {reason}")
    return engine


def _bits(subject: Subject, model: str, format: str) -> dict[str, Any]:
    """Logits of one text against those of this CPU, or where no kernels run there of all experts in slots."""
    vocab, said = subject.different.vocab, 8 if subject.small else SAID
    ids, tokens = drawn(PROMPT if not subject.small else 20, vocab, 3), drawn(said, vocab, 4)

    def logits(engine: Engine) -> torch.Tensor:
        text = Text(tokens, keep=True)
        list(engine.generate(Ids(ids), Sampling(max_new_tokens=said), draw=text))
        engine.expert_cache.check_integrity()
        return torch.stack(text.logits)

    wanted, of = None, "this CPU"
    if supported():
        engine = _loaded(model, CPU, "fast", {"budget": "all", "link": "own"}, format=format)
        try:
            wanted = logits(engine)
        finally:
            engine.unload()
    engine, left_out = _loaded(model, subject.device, "fast", {"budget": "all"}, format=format), dict[str, str]()
    try:
        for budget in ("all", FEW):
            for way, settings in WAYS.items():
                if reason := _changed(engine, {"budget": budget} | settings):
                    left_out[f"{way}_{budget}"] = reason
                    continue
                got = logits(engine)
                if wanted is None:
                    wanted, of = got, "all experts in slots"
                if not torch.equal(got, wanted):
                    first = int((got != wanted).any(1).nonzero()[0])
                    off = float((got - wanted).norm() / wanted.norm())
                    where = "the prompt's end" if not first else f"token {first}"
                    raise Wrong(
                        f"{format}, {way}, {budget}: other bits than {of} from {where} on, {off:.2g} off in norm"
                    )
    finally:
        engine.unload()
    return {"same_bits_as": of, "passes": said, "left_out_ways": left_out}


def _changed(engine: Engine, settings: dict[str, object]) -> str:
    """Have an engine go on like this -> why that cannot be."""
    try:
        engine.change(settings)
    except (SettingError, BudgetError) as error:
        return str(error)
    led = settings["gpu_decode"] != "host"
    return engine.parts.device_decode.reason if led else ""


def _speed(subject: Subject, tokens: int = 48) -> dict[str, Any]:
    """Milliseconds a token by budget, arithmetic and way, and of prompts with a third of the experts."""
    count, sizes, found = 8 if subject.small else tokens, subject.sizes, subject.report("milliseconds")
    model = str(dense_only(subject.folder / "large", sizes))
    for arithmetic in found.in_time(ARITHMETICS):
        with one_expert(sizes):
            engine = _loaded(model, subject.device, arithmetic, {"budget": "15%"})
        try:
            found[arithmetic] = _times(engine, sizes.vocab, count, fast=arithmetic == "fast")
        finally:
            engine.unload()
    return {"model": sizes.name, "milliseconds": found, "verdict": _verdict(found)}


def _times(engine: Engine, vocab: int, count: int, *, fast: bool) -> dict[str, Any]:
    times = dict[str, Any]()
    for budget in BUDGETS:
        for way, settings in WAYS.items():
            if way == "misses_on_the_host" and (budget == "all" or not fast):
                continue  # there are none, or they would have other bits
            if reason := _changed(engine, {"budget": budget} | settings):
                times[f"{budget}_{way}"] = reason
                continue
            talk(engine, vocab, count)  # what there is room for comes to be where it is used
            steps = talk(engine, vocab, count)[count // 4 :]  # the first ones capture
            times[f"{budget}_{way}"] = statistics.median(step.total_ms for step in steps)
    _changed(engine, {"budget": "35%"} | WAYS["host"])
    for length in LENGTHS:
        times[f"prompt_{length}"] = min(_prompt_ms(engine, vocab, length, seed) for seed in range(3))
    return times


def _prompt_ms(engine: Engine, vocab: int, length: int, seed: int) -> float:
    pieces = engine.generate(Ids(drawn(length, vocab, 100 + seed)), Sampling(max_new_tokens=1), draw=Text((0,)))
    return sum(piece.step.total_ms for piece in pieces if piece.step is not None and piece.step.phase == "prefill")


def _verdict(times: dict[str, Any]) -> dict[str, str]:
    """For each budget the quickest way in either arithmetic."""
    if any("left_out" in times.get(arithmetic, {"left_out": ""}) for arithmetic in ARITHMETICS):
        return {}
    starts = [*(f"{budget}_" for budget in BUDGETS), *(f"prompt_{length}" for length in LENGTHS)]
    ratios = {start.rstrip("_"): _best(times["reference"], start) / _best(times["fast"], start) for start in starts}
    return {name: f"fast {ratio:.2f} times as fast as the reference" for name, ratio in ratios.items()}


def _best(times: dict[str, Any], start: str) -> float:
    return min(ms for name, ms in times.items() if name.startswith(start) and isinstance(ms, float))
