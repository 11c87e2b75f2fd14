"""bench prefill: what does a prompt cost, beside transformers and beside one pass of its missing experts over the link?

All systems stay loaded, and a round gives each of them the same prompts, in turn: transformers in bf16, and the engine
out of packs in bf16 and in int4, with everything resident and with half the experts on disk. Its time is that to the
first token. Every prompt is new, and finds the cache as the one before left it. Where llama.cpp is installed, a process
of its own reads the same prompts in each round, in BF16 and in Q4_K_M.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from bench.fixtures import FORMATS, Fixtures, build, check_gguf, disk_gbps
from bench.plain import Plain
from bench.prefill_table import table
from bench.processes import ended_well, measure
from core.engine import Engine
from core.importing import import_model
from core.memory.pack import pack_at
from core.session.manifest import device_name, versions
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids

__all__ = ["run", "table"]

BUDGETS = ("100%", "50%")
LENGTHS = {False: (128, 512, 1500), True: (16, 48, 96)}  # tokens of a prompt; True: of the smoke test
CONTEXT = 2048
RATIO, READ, INT4 = 1.0, 1.05, 1.0  # goals


@dataclass(slots=True)
class Seen:
    """All rounds of one system and one length."""

    seconds: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)  # of these, waiting for copies
    read_bytes: list[int] = field(default_factory=list)  # copied for the prompt
    missing_bytes: list[int] = field(default_factory=list)  # of the distinct experts that it needed and had to fetch
    logits: list[torch.Tensor] = field(default_factory=list)  # [V] each, that the first token is drawn from


Systems = dict[str, dict[int, Seen]]  # by name and length


def run(
    rounds: int = 5,
    keep: Path | None = None,
    small: bool = False,
    llama: str = "",
    say: Callable[[str], None] = print,
) -> dict[str, object]:
    """Measures; returns the result as plain data. Without `keep` the files go to a temporary directory and are
    removed. `llama` = an interpreter that has llama_cpp."""
    if keep is None:
        with tempfile.TemporaryDirectory() as made:
            return run(rounds, Path(made), small, llama, say)
    rounds = 1 if small else rounds
    built = build(keep, small, llama, say)
    model, same = built.model, check_gguf(built) if built.llama else None
    packs = {name: pack_of(model, name, say) for name in FORMATS}
    speeds = disk_gbps(packs["bf16"], 0.1 if small else 0.7)
    with ExitStack() as stack:
        engines: dict[tuple[str, str], Engine] = {}
        for name in FORMATS:
            for budget in BUDGETS:
                say(f"loading {name} at {budget}")
                settings = Settings({"budget": budget, "link": "own", "predictor": "none"})
                engine = Engine.load(LoadSpec.checked(str(packs[name]), settings, context=CONTEXT))
                stack.callback(engine.unload)
                engines[name, budget] = engine
        say("loading transformers")
        plain = Plain(model, torch.bfloat16, torch.device("cpu"))
        first = engines["bf16", "100%"]
        found = _rounds(engines, plain, built, LENGTHS[small], rounds, say)
        return {
            **result(found, max(speeds.values())),
            "pieces": {name: {b: engines[name, b].sizes.chunk for b in BUDGETS} for name in FORMATS},
            "workspace_bytes": {name: {b: engines[name, b].sizes.workspace for b in BUDGETS} for name in FORMATS},
            "rounds": rounds,
            "llama_cpp": built.without or built.versions,
            "llama_cpp_check": same,
            "model": model.name,
            "model_hash": first.model_hash,
            "threads": torch.get_num_threads(),
            "disk_gbps": speeds,
            "device": device_name(first.device),
            "versions": versions(),
        }


def pack_of(model: Path, name: str, say: Callable[[str], None]) -> Path:
    """The model in one format, imported if it is not there yet."""
    pack = model.parent / f"{model.name}.{name}.pack"
    if not pack_at(pack):
        say(f"importing to {name}")
        import_model(str(model), pack, format=FORMATS[name])
    return pack


def _rounds(
    engines: Mapping[tuple[str, str], Engine],
    plain: Plain,
    built: Fixtures,
    lengths: Sequence[int],
    rounds: int,
    say: Callable[[str], None],
) -> Systems:
    """Every system reads the same prompt of each length in each round. Round 0 is warm-up and discarded."""
    systems: Systems = {}
    for number in range(rounds + 1):
        say(f"round {number} of {rounds}" if number else "warming up")
        found = systems if number else {}
        for length, ids in _prompts(lengths, number):
            _theirs(plain, ids, found.setdefault("transformers", {}).setdefault(length, Seen()))
            for (name, budget), engine in engines.items():
                _ours(engine, ids, found.setdefault(f"{name} {budget}", {}).setdefault(length, Seen()))
        for name, file in built.gguf.items() if number else ():  # it warms up by itself
            _llama(built.llama, file, dict(_prompts(lengths, number)), found.setdefault(f"llama.cpp {name}", {}))
    return systems


def _prompts(lengths: Sequence[int], number: int) -> Iterator[tuple[int, list[int]]]:
    """Random tokens of each length, others in every round."""
    drawn = np.random.default_rng(number)
    for length in lengths:
        yield length, drawn.integers(3, 4000, length).tolist()


def _theirs(plain: Plain, ids: list[int], seen: Seen) -> None:
    seconds, logits = plain.prefill(ids)
    seen.seconds.append(seconds)
    seen.logits.append(logits)


def _llama(python: str, file: Path, prompts: Mapping[int, list[int]], found: dict[int, Seen]) -> None:
    job = {
        "kind": "prefill",
        "model": str(file),
        "prompts": [*prompts.values()],
        "context": CONTEXT,
        "threads": torch.get_num_threads(),
    }
    answer = ended_well(measure("bench.llama", job, [], python, cold=False), "llama.cpp")
    for length, seconds in zip(prompts, answer["seconds"], strict=True):
        found.setdefault(length, Seen()).seconds.append(seconds)


def _ours(engine: Engine, ids: list[int], seen: Seen) -> None:
    before = [engine.expert_cache.is_resident(eid) for eid in range(engine.shape.total)]

    def draw(_: Sequence[int], logits: torch.Tensor) -> int:
        seen.logits.append(logits[0].clone())
        return int(logits[0].argmax())

    steps, began_s, ended_s = {}, time.perf_counter(), 0.0
    for piece in engine.generate(Ids(ids), Sampling(max_new_tokens=1), draw=draw):
        if piece.kind == "prefill" and piece.step is not None:
            steps[piece.step.index] = piece.step
            ended_s = time.perf_counter()
    asked = {
        int(layer) * engine.shape.experts + int(expert)
        for step in steps.values()
        for layer, expert in zip(step.layer, step.expert, strict=True)
    }
    seen.seconds.append(ended_s - began_s)
    seen.stall_s.append(sum(step.stall_ms for step in steps.values()) / 1e3)
    seen.read_bytes.append(sum(step.demand_bytes + step.prefetch_bytes for step in steps.values()))
    seen.missing_bytes.append(engine.sizes.blob * sum(not before[eid] for eid in asked))


# ---------------------------------------------------------------------- the result


def result(found: Systems, disk: float) -> dict[str, Any]:
    """Everything as plain data, by format, budget and length: first the figures of the goals. `disk` = GB/s."""

    def each(value: Callable[[str, str, int], float | None]) -> dict[str, dict[str, dict[str, float | None]]]:
        lengths = list(found["transformers"])
        return {
            name: {budget: {str(n): value(name, budget, n) for n in lengths} for budget in BUDGETS} for name in FORMATS
        }

    def seen(name: str, budget: str, length: int) -> Seen:
        return found[f"{name} {budget}"][length]

    def ratio(name: str, budget: str, length: int) -> float | None:
        return _ratio(found["transformers"][length].seconds, seen(name, budget, length).seconds)

    def read(name: str, budget: str, length: int) -> float | None:
        one = seen(name, budget, length)
        return _ratio(one.read_bytes, one.missing_bytes)

    def over_bound(name: str, budget: str, length: int) -> float | None:
        """Its time over the longer of computing alone and reading the missing experts once."""
        one, whole = seen(name, budget, length), seen(name, "100%", length).seconds
        bounds = [max(s, b / (disk * 1e9)) for s, b in zip(whole, one.missing_bytes, strict=True)]
        return _ratio(one.seconds, bounds)

    by_int4 = {
        budget: {
            str(n): _ratio(seen("bf16", budget, n).seconds, seen("int4", budget, n).seconds)
            for n in found["transformers"]
        }
        for budget in BUDGETS
    }
    ratios, reads = each(ratio), each(read)
    return {
        "prefill_ratio": ratios,
        "read_over_missing": reads,
        "int4_over_bf16": by_int4,
        "over_bound": each(over_bound),
        "over_llama": {
            name: {
                str(n): _ratio(one.seconds, seen(name, "100%", n).seconds)
                for n, one in found.get(f"llama.cpp {name}", {}).items()
            }
            for name in FORMATS
        },
        "goals": goals(ratios, reads, by_int4),
        "tok_s": {
            system: {str(n): median(n / s for s in one.seconds) for n, one in lengths.items()}
            for system, lengths in found.items()
        },
        "seconds": {system: {str(n): one.seconds for n, one in of.items()} for system, of in found.items()},
        "stall_s": each(lambda name, budget, n: median(seen(name, budget, n).stall_s)),
        "missing_bytes": each(lambda name, budget, n: median(seen(name, budget, n).missing_bytes)),
        "same_bits": {
            budget: {
                str(n): all(map(torch.equal, one.logits, seen("bf16", budget, n).logits))
                for n, one in found["transformers"].items()
            }
            for budget in BUDGETS
        },
    }


def _ratio(some: Sequence[float], others: Sequence[float]) -> float | None:
    """The median of the rounds' own ratios, of those that have one."""
    values = [a / b for a, b in zip(some, others, strict=True) if b]
    return median(values) if values else None


def goals(
    ratios: Mapping[str, Any], reads: Mapping[str, Any], by_int4: Mapping[str, Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    """Goals, the furthest figure from each, and whether it is met; None where it could not be measured."""
    resident = [one for name in ratios for one in ratios[name]["100%"].values()]
    missing = [one for name in reads for of in reads[name].values() for one in of.values()]
    return [
        _goal("tokens a second over transformers', everything resident, the least", RATIO, min, resident),
        _goal("bytes read over those of distinct missing experts, the most", READ, max, missing),
        _goal("int4 over bf16, everything resident, the least", INT4, min, [*by_int4["100%"].values()]),
    ]


def _goal(what: str, asked: float, worst: Callable[[list[float]], float], values: Sequence[float | None]) -> Any:
    known = [one for one in values if one is not None]
    found = worst(known) if known else None
    kept = None if found is None else found >= asked if worst is min else found <= asked
    return {"goal": what, "sign": ">=" if worst is min else "<=", "asked": asked, "found": found, "kept": kept}
