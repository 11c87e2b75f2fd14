"""bench peers: with everything resident, how fast are prompts and tokens beside ik_llama.cpp and llama.cpp?

One generated model in 4 bits and in bf16. In each round every system reads the same prompts and decodes the same tokens
after them, by turns; all stay loaded. A file's bits a weight and its KL to the bf16 weights stand with its speed, so
that speeds can be compared at equal quality. ik_llama.cpp is taken in its fastest configuration, which a short trial
finds."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bench.harness.engines import pack_of, random_tokens
from bench.harness.paired import times
from bench.harness.report import goal, goal_lines, interval
from bench.harness.run import RESIDENT, Result, Run, Suite, chosen, numbers
from bench.models.fixtures import DENSE, FORMATS
from bench.models.generate import checkpoint
from bench.models.peers import FILES, NAMES, Peer, peers_of
from bench.models.sizes import FULL, SMALL
from bench.speed.fidelity import HEADS, NOTE, Fidelity, shown
from bench.speed.plain import Plain
from core.engine import Engine
from core.runtime.batch import Batch, Share
from core.runtime.sequence_kv import SequenceKV
from core.settings.formats import DENSE as DENSE_FORMATS
from core.settings.formats import FORMATS as ALL
from core.system.wording import grid

LENGTHS = {False: (128, 512, 1500), True: (16, 48)}  # tokens of a prompt; True: of the smoke test
CONTEXT, WARM = 2048, 4  # tokens; WARM: not counted of those decoded
ARITHMETICS = "fast", "reference"
CODED = [name for name, one in ALL.items() if one.bits == 4]
GOALS = [  # kind, figure, peer, asked: of the fast arithmetic over the peer
    ("int4", "decode", "ik", 0.95),
    ("int4", "decode", "llama", 1.2),
    ("bf16", "decode", "llama", 1.0),
    ("int4", "prompt", "ik", 0.8),
    ("bf16", "prompt", "ik", 0.9),
]


class Speeds(NamedTuple):
    """Tokens a second of one system after one length of prompt, a value for each round."""

    prompt: list[float]
    decode: list[float]


def measure(
    run: Run,
    rounds: int = 5,
    tokens: int = 64,
    formats: str = "int4,bf16",
    lengths: str = "",
    arithmetics: str = "fast,reference",
    peers: str = "",
    coded: str = FORMATS["int4"],
) -> Result:
    """`formats`: which of FORMATS; `lengths`: of prompts, "" = LENGTHS; `arithmetics`: ours; `peers`: as
    `bench.models.peers.agreed`; `coded`: ours of 4 bits."""
    kinds, ours = chosen("format", formats, FORMATS), chosen("arithmetic", arithmetics, ARITHMETICS)
    files = {kind: (file,) for kind, file in FORMATS.items()} | {"int4": chosen("format of 4 bits", coded, CODED)}
    sizes = numbers(lengths, LENGTHS[run.small])
    model = checkpoint(run.folder(), SMALL if run.small else FULL, say=run.say)
    others = peers_of(run, peers, model, kinds)
    run.say("loading transformers")
    fidelity = Fidelity(model, Plain(model, torch.bfloat16, torch.device("cpu")))
    found: dict[str, Any] = {}
    for kind in kinds:
        with ExitStack() as stack:
            systems, about = _systems(run, stack, model, kind, files[kind], ours, others[kind], fidelity)
            found[kind] = {"about": about, "speeds": _rounds(run, systems, kind, sizes, rounds, tokens)}
        run.so_far({**_compared(found), "found": found})
    return {**_compared(found), "found": found, "lengths": list(sizes), "model": model.name}


Timed = Callable[..., Mapping[str, Any]]  # (prompt=, tokens=) -> prompt_s, token_s


def _systems(
    run: Run,
    stack: ExitStack,
    model: Path,
    kind: str,
    files: Iterable[str],
    ours: Sequence[str],
    others: Iterable[Peer],
    fidelity: Fidelity,
) -> tuple[dict[str, Timed], dict[str, Any]]:
    """What takes part in one format, and of each its file, bits a weight, and KL."""
    systems: dict[str, Timed] = {}
    about: dict[str, Any] = {}
    for file in files:
        usual = file == FORMATS[kind]
        pack = pack_of(run, str(model), kind if usual else file, format=file)
        for arithmetic in ours:
            load: dict[str, Any] = {"arithmetic": arithmetic, "context": CONTEXT, "threads": run.threads}
            load["dense"] = file if not usual and file in DENSE_FORMATS else DENSE[kind]
            engine = stack.enter_context(run.loaded(str(pack), {**RESIDENT, "predictor": "none"}, **load))
            name = arithmetic if usual else f"{arithmetic} {file}"
            systems[name] = _Ours(engine).timed
            about[name] = {**fidelity.of_engine(engine, file), "computed_by": engine.arithmetic.name}
    for peer in others:
        about[peer.name] = {**fidelity.of_peer(peer), **(switches := peer.fastest(run.say))}
        systems[peer.name] = stack.enter_context(peer.opened(**switches)).ask
    return systems, about


class _Ours:
    """An engine, one pass after the other."""

    def __init__(self, engine: Engine) -> None:
        self._wiring = engine.wiring

    def timed(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        kv, seconds = self._wiring.kv.fresh(), []
        for ids in ([*prompt], *([token] for token in tokens)):
            began_s = time.perf_counter()
            self._pass(ids, kv)
            seconds.append(time.perf_counter() - began_s)
        return {"prompt_s": seconds[0], "token_s": seconds[1:]}

    def _pass(self, ids: list[int], kv: SequenceKV) -> None:
        pipeline, chunk = self._wiring.measuring, self._wiring.loaded.sizes.chunk
        for at in range(0, len(ids), chunk):
            share = Share(ids[at : at + chunk], kv)
            pipeline.begin(batch := Batch("decode" if len(ids) == 1 else "prefill", (share,)))
            try:
                pipeline.forward(batch, 1)
            finally:
                pipeline.end()


def _rounds(
    run: Run, systems: Mapping[str, Timed], kind: str, lengths: Sequence[int], rounds: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """By system and length: the speeds of every round."""
    found = {name: {str(length): Speeds([], []) for length in lengths} for name in systems}

    def one(name: str, number: int) -> None:
        for length in lengths:
            text = random_tokens(length + tokens + WARM, number, length)
            answer = systems[name](prompt=text[:length], tokens=text[length:])
            if number:
                seconds = answer["token_s"][WARM:] or answer["token_s"]
                found[name][str(length)].prompt.append(length / answer["prompt_s"])
                found[name][str(length)].decode.append(1 / median(seconds))

    run.by_turns([*systems], one, rounds, what=kind)
    return {name: {length: one._asdict() for length, one in of.items()} for name, of in found.items()}


def _compared(found: Mapping[str, Any]) -> Result:
    """Ratios of ours to each peer's with their intervals, from the rounds as pairs; and the goals."""
    ratios: dict[str, Any] = {}
    for kind, of in found.items():
        for peer in NAMES:
            for length, theirs in of["speeds"].get(peer, {}).items():
                for figure in ("prompt", "decode"):
                    for ours in (name for name in of["speeds"] if name not in NAMES):
                        both = of["speeds"][ours][length][figure], theirs[figure]
                        ratios[f"{kind} {figure} {length} {ours}/{peer}"] = times(*both)._asdict()
    goals = []
    for kind, figure, peer, asked in GOALS:
        start, end = f"{kind} {figure} ", f" fast/{peer}"
        least = [one["ratio"] for name, one in ratios.items() if name.startswith(start) and name.endswith(end)]
        what = f"{kind} {figure}, fast over {NAMES[peer]} {FILES[kind][peer]}, the least of all lengths"
        goals.append(goal(what, ">=", asked, min(least, default=None)))
    return {"ratios": ratios, "goals": goals}


def table(f: Result) -> list[str]:
    rows = []
    for kind, of in f["found"].items():
        for name, speeds in of["speeds"].items():
            for length, one in speeds.items():
                medians = [f"{median(one[figure]):.1f}" for figure in ("prompt", "decode")]
                over = [
                    interval(f["ratios"].get(f"{kind} {figure} {length} {name}/{peer}"))
                    for figure in ("prompt", "decode")
                    for peer in NAMES
                ]
                rows.append((NAMES.get(name, name), *shown(of["about"][name]), length, *medians, *over))
    ratios = "prompt/ik", "/llama.cpp", "decode/ik", "/llama.cpp"
    return [
        f"{f['model']}: everything resident, medians of {f['rounds']} rounds by turns, {f['threads']} threads",
        *grid(("", *HEADS, "prompt", "tok/s", "decode tok/s", *ratios), rows),
        f"  ({NOTE}; ratios with their 95 % interval)",
        *goal_lines(f["goals"]),
    ]


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 8, "peers": "none"})
