"""bench prefill: what does a prompt cost, against transformers and against one pass of its missing experts over the
link?

All systems stay loaded, and a round gives each of them the same prompts: transformers in bf16, and the engine out of
packs in bf16 and in int4, with everything resident and with half of the experts on disk. The time is that to the first
token. Every prompt is new, and finds the cache as the one before left it. ik_llama.cpp and llama.cpp read the same
prompts in each round, with everything resident."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from bench.harness.engines import pack_of, random_tokens
from bench.harness.figures import ratio
from bench.harness.paired import times
from bench.harness.report import goal, goal_lines, interval
from bench.harness.run import Result, Run, Suite, numbers
from bench.models.fixtures import DENSE, FORMATS, disk_gbps
from bench.models.generate import checkpoint
from bench.models.peers import NAMES, peers_of
from bench.models.sizes import FULL, SMALL
from bench.speed.fidelity import HEADS, NOTE, Fidelity, shown
from bench.speed.plain import Plain
from core.engine import Engine
from core.settings.sampling import Sampling
from core.system.wording import cell, grid
from core.types import Ids

BUDGETS = ("100%", "50%")
LENGTHS = {False: (128, 512, 1500), True: (16, 48, 96)}  # tokens of a prompt; True: of the smoke test
CONTEXT = 2048
RATIO, READ, INT4 = 1.0, 1.05, 1.0  # goals
OURS = [(name, budget) for name in FORMATS for budget in BUDGETS]


@dataclass(slots=True)
class Seen:
    """All rounds of one system and one length."""

    seconds: list[float] = field(default_factory=list)
    stall_s: list[float] = field(default_factory=list)  # of these, waiting for copies
    read_bytes: list[int] = field(default_factory=list)  # copied for the prompt
    missing_bytes: list[int] = field(default_factory=list)  # of the distinct experts that it needed and had to fetch
    logits: list[torch.Tensor] = field(default_factory=list)  # [V] each, that the first token is drawn from


Systems = dict[str, dict[int, Seen]]  # by name and length


def measure(run: Run, rounds: int = 5, lengths: str = "", peers: str = "") -> Result:
    """`lengths`: of prompts, "" = LENGTHS; `peers`: as `bench.models.peers.agreed`."""
    sizes = numbers(lengths, LENGTHS[run.small])
    model = checkpoint(run.folder(), SMALL if run.small else FULL, say=run.say)
    others = {f"{NAMES[peer.name]} {name}": peer for name, of in peers_of(run, peers, model).items() for peer in of}
    packs = {name: pack_of(run, str(model), name, format=FORMATS[name]) for name in FORMATS}
    speeds = disk_gbps(packs["bf16"], 0.1 if run.small else 0.7)
    engines: dict[str, Engine] = {}
    for name, budget in OURS:
        settings = {"budget": budget, "link": "own", "predictor": "none"}
        engines[f"{name} {budget}"] = run.engine(str(packs[name]), settings, context=CONTEXT, dense=DENSE[name])
    run.say("loading transformers")
    plain = Plain(model, torch.bfloat16, torch.device("cpu"))
    fidelity = Fidelity(model, plain)
    about = {name: fidelity.of_engine(engines[f"{name} 100%"], FORMATS[name]) for name in FORMATS}
    about |= {name: fidelity.of_peer(peer) for name, peer in others.items()}
    switches = {name: peer.fastest(run.say) for name, peer in others.items()}
    found: Systems = {}
    for number in run.rounds(rounds):
        systems = found if number else {}
        prompts = {length: random_tokens(length, number, length) for length in sizes}
        for length, ids in prompts.items():
            _theirs(plain, run.threads, ids, systems.setdefault("transformers", {}).setdefault(length, Seen()))
            for name, engine in engines.items():
                _ours(engine, ids, systems.setdefault(name, {}).setdefault(length, Seen()))
        for name, peer in others.items() if number else ():
            with peer.opened(**switches[name]) as session:  # one at a time: each holds the whole model
                session.ask(prompt=random_tokens(sizes[0], 0), tokens=[])
                for length, ids in prompts.items():
                    seconds = session.ask(prompt=ids, tokens=[])["prompt_s"]
                    systems.setdefault(name, {}).setdefault(length, Seen()).seconds.append(seconds)
    return {
        **result(found, max(speeds.values())),
        "pieces": {name: engine.sizes.chunk for name, engine in engines.items()},
        "workspace_bytes": {name: engine.sizes.workspace for name, engine in engines.items()},
        "about": about,
        "model": model.name,
        "disk_gbps": speeds,
    }


def _theirs(plain: Plain, threads: int, ids: list[int], seen: Seen) -> None:
    seconds, logits = plain.prefill(ids, threads)
    seen.seconds.append(seconds)
    seen.logits.append(logits)


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
    needed = {
        int(layer) * engine.shape.experts + int(expert)
        for step in steps.values()
        for layer, expert in zip(step.layer, step.expert, strict=True)
    }
    seen.seconds.append(ended_s - began_s)
    seen.stall_s.append(sum(step.stall_ms for step in steps.values()) / 1e3)
    seen.read_bytes.append(sum(step.demand_bytes + step.prefetch_bytes for step in steps.values()))
    seen.missing_bytes.append(engine.sizes.blob * sum(not before[eid] for eid in needed))


# ---------------------------------------------------------------------- the result


def result(found: Systems, disk: float) -> dict[str, Any]:
    """Everything as plain data, by format, budget and length: first the figures of the goals. `disk` = GB/s."""
    theirs = found["transformers"]

    def seen(name: str, budget: str, length: int) -> Seen:
        return found[f"{name} {budget}"][length]

    def each(value: Callable[[str, str, int], float | None]) -> dict[str, dict[str, dict[str, float | None]]]:
        return {name: {b: {str(n): value(name, b, n) for n in theirs} for b in BUDGETS} for name in FORMATS}

    def over_bound(name: str, budget: str, length: int) -> float | None:
        """Its time over the longer of computing alone and reading the missing experts once."""
        one, whole = seen(name, budget, length), seen(name, "100%", length).seconds
        bounds = [max(s, b / (disk * 1e9)) for s, b in zip(whole, one.missing_bytes, strict=True)]
        return ratio(one.seconds, bounds)

    ratios = each(lambda name, b, n: ratio(theirs[n].seconds, seen(name, b, n).seconds))
    reads = each(lambda name, b, n: ratio(seen(name, b, n).read_bytes, seen(name, b, n).missing_bytes))
    by_int4 = {
        b: {str(n): ratio(seen("bf16", b, n).seconds, seen("int4", b, n).seconds) for n in theirs} for b in BUDGETS
    }
    return {
        "prefill_ratio": ratios,
        "read_over_missing": reads,
        "int4_over_bf16": by_int4,
        "over_bound": each(over_bound),
        "over": {
            f"{name} at 100% over {other}": {
                str(n): times(one.seconds, seen(name, "100%", n).seconds)._asdict()
                for n, one in found[f"{other} {name}"].items()
            }
            for name in FORMATS
            for other in NAMES.values()
            if f"{other} {name}" in found
        },
        "goals": goals(ratios, reads, by_int4),
        "tok_s": {
            name: {str(n): median(n / s for s in one.seconds) for n, one in of.items()} for name, of in found.items()
        },
        "seconds": {name: {str(n): one.seconds for n, one in of.items()} for name, of in found.items()},
        "stall_s": each(lambda name, b, n: median(seen(name, b, n).stall_s)),
        "missing_bytes": each(lambda name, b, n: median(seen(name, b, n).missing_bytes)),
        "same_bits": {
            b: {str(n): all(map(torch.equal, one.logits, seen("bf16", b, n).logits)) for n, one in theirs.items()}
            for b in BUDGETS
        },
    }


def goals(
    ratios: Mapping[str, Any], reads: Mapping[str, Any], by_int4: Mapping[str, Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    """Goals, and the figure furthest from each."""

    def known(values: Sequence[float | None]) -> list[float]:
        return [one for one in values if one is not None]

    resident = known([one for name in ratios for one in ratios[name]["100%"].values()])
    missing = known([one for name in reads for of in reads[name].values() for one in of.values()])
    int4 = known([*by_int4["100%"].values()])
    return [
        goal(
            "tokens a second over transformers', everything resident, the least",
            ">=",
            RATIO,
            min(resident, default=None),
        ),
        goal("bytes read over those of distinct missing experts, the most", "<=", READ, max(missing, default=None)),
        goal("int4 over bf16, everything resident, the least", ">=", INT4, min(int4, default=None)),
    ]


def table(f: Result) -> list[str]:
    rows = []
    for name, sizes in f["prefill_ratio"].items():
        for budget, ratios in sizes.items():
            for length, one in ratios.items():
                same = f["same_bits"][budget][length] if name == "bf16" and f["arithmetic"] == "reference" else None
                bits = "-" if same is None else "the same" if same else "DIFFERENT"
                speeds = (f["tok_s"][system][length] for system in (f"{name} {budget}", "transformers"))
                more = (one, *(f[figure][name][budget][length] for figure in ("read_over_missing", "over_bound")))
                rows.append((name, budget, length, *(f"{s:.1f}" for s in speeds), *map(cell, more), bits))
    return [
        f"{f['model']}: prompts, medians of {f['rounds']} rounds, {f['threads']} threads",
        *grid(
            ("experts", "budget", "tokens", "tok/s", "transformers", "ratio", "read/missing", "over bound", "bits"),
            rows,
        ),
        *(f"  int4 over bf16 at {budget}: {_by_length(of)}" for budget, of in f["int4_over_bf16"].items()),
        *(
            f"  {over}: {', '.join(f'{n} tokens {interval(one)}' for n, one in of.items())}"
            for over, of in f["over"].items()
        ),
        *grid(("system", *HEADS), [(name, *shown(about)) for name, about in f["about"].items()]),
        f"  ({NOTE})",
        "  (bound: the longer of computing alone and reading the missing experts once from this disk; bits: whether "
        "the reference arithmetic's logits are transformers')",
        *goal_lines(f["goals"]),
    ]


def _by_length(ratios: Mapping[str, float | None]) -> str:
    return ", ".join(f"{length} tokens {cell(one)}" for length, one in ratios.items())


SUITE = Suite(measure, table, small={"rounds": 1, "peers": "none"})
