"""bench peers: with everything resident, how fast are prompts and tokens beside ik_llama.cpp and llama.cpp?

One generated model in 4 bits and in bf16. In each round every system reads the same prompts and decodes the same
tokens after them, by turns; all stay loaded. A file's bits a weight and its KL to the bf16 weights stand with its
speed, so that speeds can be compared at equal quality. ik_llama.cpp is taken in its fastest configuration, which a
short trial finds.
"""

from __future__ import annotations

import json
import math
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple, Self

import torch

from bench.harness.engines import pack_of, random_tokens
from bench.harness.paired import difference
from bench.harness.process import ROOT
from bench.harness.report import cell, goal, goal_lines, grid
from bench.harness.run import Result, Run, Suite
from bench.models import peers as programs
from bench.models.fixtures import DENSE, FORMATS
from bench.models.generate import checkpoint
from bench.models.sizes import FULL, SMALL
from bench.speed.plain import Plain
from core.engine import Engine
from core.engine.distance import divergence
from core.errors import MoestroError
from core.runtime.batch import Batch, Share

LENGTHS = {False: (128, 512, 1500), True: (16, 48)}  # tokens of a prompt; True: of the smoke test
CONTEXT, TEXT, WARM = 2048, 48, 4  # tokens; TEXT: of which logits are compared, WARM: not counted of those decoded
FILES = {"int4": {"ik": "Q4_0", "llama": "Q4_K_M"}, "bf16": {"ik": "BF16", "llama": "BF16"}}
NAMES = {"ik": "ik_llama.cpp", "llama": "llama.cpp"}
CONFIGURATIONS = [(True, True), (True, False), (False, True), (False, False)]  # of ik_llama.cpp: repack, flash
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


class Peer:
    """Another program with a model, in a process of its own."""

    def __init__(self, python: Path, **job: Any) -> None:
        """Raises MoestroError where it does not start."""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # until the end
        self._process = subprocess.Popen(
            [str(python), str(ROOT / "bench" / "speed" / "peer_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )
        self.ask(**job)

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Its answer. Raises MoestroError where it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            reason = (self._errors.read().strip().splitlines() or ["no reason was given"])[-1]
            raise MoestroError(f"The other program ended: {reason}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()


def measure(
    run: Run, rounds: int = 5, tokens: int = 64, formats: str = "int4,bf16", lengths: str = "", peers: str = ""
) -> Result:
    """`formats`: which of FORMATS; `lengths`: of prompts, "" = LENGTHS; `peers`: as `bench.models.peers.agreed`."""
    folder, names, threads = run.folder(), programs.agreed(peers), torch.get_num_threads()
    kinds, sizes = formats.split(","), [int(one) for one in lengths.split(",") if one] or LENGTHS[run.small]
    if unknown := [kind for kind in kinds if kind not in FORMATS]:
        raise MoestroError(f"There is no format {', '.join(unknown)} here. Choose of {', '.join(FORMATS)}.")
    model = checkpoint(folder, SMALL if run.small else FULL, say=run.say)
    python = programs.environment(folder / "peers", names, run.say) if names else Path()
    text = random_tokens(TEXT, 0)
    run.say("loading transformers")
    base = torch.tensor(Plain(model, torch.bfloat16, torch.device("cpu")).logits(text))
    found: dict[str, Any] = {}
    for kind in kinds:
        with ExitStack() as stack:
            systems, about = _systems(run, stack, model, kind, names, python, threads, text, base)
            found[kind] = {"about": about, "speeds": _rounds(run, systems, kind, sizes, rounds, tokens)}
    return {**_compared(found), "found": found, "lengths": list(sizes), "model": model.name}


Timed = Callable[[list[int], list[int]], Mapping[str, Any]]  # (prompt, tokens) -> prompt_s, token_s


def _systems(
    run: Run,
    stack: ExitStack,
    model: Path,
    kind: str,
    names: list[str],
    python: Path,
    threads: int,
    text: list[int],
    base: torch.Tensor,
) -> tuple[dict[str, Timed], dict[str, Any]]:
    """What takes part in one format, and of each its file, bits a weight, and KL."""
    systems: dict[str, Timed] = {}
    about: dict[str, Any] = {}
    pack = pack_of(run, str(model), kind, format=FORMATS[kind])
    settings = {"budget": "100%", "link": "own", "predictor": "none"}
    for arithmetic in ("fast", "reference"):
        load: dict[str, Any] = {"arithmetic": arithmetic, "context": CONTEXT, "dense": DENSE[kind], "threads": threads}
        engine = stack.enter_context(run.loaded(str(pack), settings, **load))
        systems[arithmetic] = _Ours(engine).timed
        bits = _bits(engine.sizes.dense + engine.sizes.blob * engine.shape.total, model)
        figures = {"bits": bits, "kl": _kl(base, _Ours(engine).logits(text))}
        about[arithmetic] = {"file": FORMATS[kind], **figures, "computed_by": engine.arithmetic.name}
    for name in names:
        file = programs.gguf(model, FILES[kind][name], python, run.say)
        job = {"peer": name, "path": str(file), "threads": threads}  # torch's own are fewer once an engine is loaded
        if name == "ik":
            job |= _fastest(run, python, job)
        peer = stack.enter_context(Peer(python, **job))
        systems[name] = lambda prompt, tokens, peer=peer: peer.ask(prompt=prompt, tokens=tokens)  # type: ignore[misc]
        about[name] = {"file": FILES[kind][name], "bits": _bits(file.stat().st_size, model), "kl": None, **job}
        if "ik" in names:  # which reads the files of both
            with Peer(python, peer="ik", path=str(file), threads=1, repack=False, flash=False) as reader:
                about[name]["kl"] = _kl(base, torch.tensor(reader.ask(text=text)["logits"]))
    return systems, about


def _fastest(run: Run, python: Path, job: Mapping[str, Any]) -> dict[str, bool]:
    """The configuration of ik_llama.cpp that reads a prompt and decodes after it in the shortest time."""
    run.say("trying configurations of ik_llama.cpp")
    seconds = {}
    for repack, flash in CONFIGURATIONS:
        try:
            with Peer(python, **job, repack=repack, flash=flash) as peer:
                answers = [peer.ask(prompt=random_tokens(LENGTHS[run.small][1], 1), tokens=[5] * 48) for _ in range(2)]
        except MoestroError:  # some of them end with an error on some processors
            continue
        seconds[repack, flash] = answers[1]["prompt_s"] + sum(answers[1]["token_s"])
    if not seconds:
        raise MoestroError("ik_llama.cpp runs in no configuration here. Leave it out: --peers llama.")
    repack, flash = min(seconds, key=lambda one: seconds[one])
    return {"repack": repack, "flash": flash}


class _Ours:
    """An engine, one pass after the other."""

    def __init__(self, engine: Engine) -> None:
        self._wiring = engine.wiring

    def timed(self, prompt: list[int], tokens: list[int]) -> dict[str, Any]:
        kv, seconds = self._wiring.kv.fresh(), []
        for ids in ([*prompt], *([token] for token in tokens)):
            began_s = time.perf_counter()
            self._pass(ids, kv, 1)
            seconds.append(time.perf_counter() - began_s)
        return {"prompt_s": seconds[0], "token_s": seconds[1:]}

    def logits(self, text: list[int]) -> torch.Tensor:
        """[T, V]."""
        return self._pass(text, self._wiring.kv.fresh(), len(text)).float()

    def _pass(self, ids: list[int], kv: Any, keep: int) -> torch.Tensor:
        pipeline, rows = self._wiring.measuring, list[torch.Tensor]()
        chunk = len(ids) if keep > 1 else self._wiring.loaded.sizes.chunk
        for at in range(0, len(ids), chunk):
            share = Share(ids[at : at + chunk], kv)
            pipeline.begin(batch := Batch("decode" if len(ids) == 1 else "prefill", (share,)))
            try:
                rows.append(pipeline.forward(batch, keep).clone())
            finally:
                pipeline.end()
        return rows[-1]


def _rounds(
    run: Run, systems: Mapping[str, Timed], kind: str, lengths: Sequence[int], rounds: int, tokens: int
) -> dict[str, dict[str, Any]]:
    """By system and length: the speeds of every round."""
    found = {name: {str(length): Speeds([], []) for length in lengths} for name in systems}

    def one(name: str, number: int) -> None:
        for length in lengths:
            text = random_tokens(length + tokens + WARM, number, length)
            answer = systems[name](text[:length], text[length:])
            if number:
                seconds = answer["token_s"][WARM:] or answer["token_s"]
                found[name][str(length)].prompt.append(length / answer["prompt_s"])
                found[name][str(length)].decode.append(1 / median(seconds))

    run.by_turns([*systems], one, rounds, what=kind)
    return {name: {length: one._asdict() for length, one in of.items()} for name, of in found.items()}


def _bits(size: int, model: Path) -> float:
    """Bits a weight of so many bytes, by the size of the model's files in 16 bits."""
    return 16 * size / sum(one.stat().st_size for one in model.rglob("*.safetensors"))


def _kl(base: torch.Tensor, other: torch.Tensor) -> float:
    """KL(base || other) in nats a token."""
    p, q = (one.double().log_softmax(-1) for one in (base, other))
    return fmean(divergence(p, q).tolist())


def _compared(found: Mapping[str, Any]) -> Result:
    """Ratios of ours to each peer's with their intervals, from the rounds as pairs; and the goals."""
    ratios: dict[str, Any] = {}
    for kind, of in found.items():
        for peer in NAMES:
            for length, theirs in of["speeds"].get(peer, {}).items():
                for figure in ("prompt", "decode"):
                    for ours in ("fast", "reference"):
                        logs = ([math.log(one) for one in two[figure]] for two in (of["speeds"][ours][length], theirs))
                        ratios[f"{kind} {figure} {length} {ours}/{peer}"] = _ratio(*logs)
    goals = []
    for kind, figure, peer, asked in GOALS:
        start, end = f"{kind} {figure} ", f" fast/{peer}"
        least = [one["ratio"] for name, one in ratios.items() if name.startswith(start) and name.endswith(end)]
        what = f"{kind} {figure}, fast over {NAMES[peer]} {FILES[kind][peer]}, the least of all lengths"
        goals.append(goal(what, ">=", asked, min(least, default=None)))
    return {"ratios": ratios, "goals": goals}


def _ratio(some: Sequence[float], others: Sequence[float]) -> dict[str, float | None]:
    """The geometric mean of ratios, from logarithms, and its interval where there are enough rounds."""
    between = difference(some, others)
    mean = fmean(one - other for one, other in zip(some, others, strict=True))
    low, high = (math.exp(between.low), math.exp(between.high)) if between is not None else (None, None)
    return {"ratio": math.exp(mean), "low": low, "high": high}


def table(f: Result) -> list[str]:
    rows = []
    for kind, of in f["found"].items():
        for name, speeds in of["speeds"].items():
            about = of["about"][name]
            for length, one in speeds.items():
                shown = [f"{median(one[figure]):.1f}" for figure in ("prompt", "decode")]
                over = [
                    _shown(f["ratios"].get(f"{kind} {figure} {length} {name}/{peer}"))
                    for figure in ("prompt", "decode")
                    for peer in NAMES
                ]
                what = f"{NAMES.get(name, name)} {about['file']}"
                rows.append((what, f"{about['bits']:.2f}", cell(about["kl"], ".2g"), length, *shown, *over))
    heads = ("", "bits", "KL", "prompt", "tok/s", "decode tok/s", "prompt/ik", "/llama.cpp", "decode/ik", "/llama.cpp")
    return [
        f"{f['model']}: everything resident, medians of {f['rounds']} rounds by turns, {f['threads']} threads",
        *grid(heads, rows),
        "  (bits: of a weight; KL: to transformers in bf16, nats a token; ratios with their 95 % interval)",
        *goal_lines(f["goals"]),
    ]


def _shown(ratio: Mapping[str, float | None] | None) -> str:
    if ratio is None:
        return "-"
    between = f" ({cell(ratio['low'])}-{cell(ratio['high'])})" if ratio["low"] is not None else ""
    return cell(ratio["ratio"]) + between


SUITE = Suite(measure, table, small={"rounds": 1, "tokens": 8, "peers": "none"})
