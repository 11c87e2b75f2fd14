"""The engine's and transformers' side of `bench tiers`: one measurement in its own process."""

import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.harness.protocol import STARTED_S, Highest, Job, children_bytes, own_bytes, read_bytes, take_part

CONTEXT = 512
FILL_TOKENS = 8  # of an answer at the end of a full context
NEEDS = {
    "import": ["core.importing"],
    "moestro": ["core.engine.engine", "bench.harness.figures"],
    "fit": ["core.engine.engine"],
    "transformers": ["bench.speed.plain"],
}


def prepare(job: Job) -> Callable[[Job], Job]:
    """Imports everything the job needs, including the architecture's module and the compiler of native code, so that
    idle memory includes it all. The memory of compiling counts as the model's in an estimate, and as idle under a
    limit: other programs are compiled beforehand."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in (*NEEDS[job["kind"]], "transformers.models.qwen3_moe.modeling_qwen3_moe"):
        importlib.import_module(name)
    if "core.engine.engine" in NEEDS[job["kind"]]:
        from core.memory.codec.native.threads import acquire_team
        from core.system.native.compile import supported

        if supported() and job["kind"] == "moestro":
            acquire_team().release()
    run = {"import": import_pack, "moestro": moestro, "fit": fit, "transformers": plain}[job["kind"]]
    return lambda _: run(job)


def import_pack(job: Job) -> Job:
    """Seconds of importing a checkpoint into a pack."""
    from core.importing import import_model

    began_s = time.perf_counter()
    import_model(job["source"], Path(job["out"]), format=job["format"])
    return {"seconds": time.perf_counter() - began_s}


def moestro(job: Job) -> Job:
    """Opens a pack, answers a prompt with sampled tokens, and measures all after the first `warm` of them. In a memory
    group the limit is what the budget stands for, and no margin is left to a system that is not in it."""
    from core.capacity import fit
    from core.engine import Engine
    from core.settings.config import Settings
    from core.settings.loading import LoadSpec
    from core.settings.sampling import Sampling
    from core.system.native import kept_code

    if job.get("group"):
        fit.HOST_MARGIN = 0
    if job.get("kernels"):
        kept_code.keep_in(Path(job["kernels"]))
    idle, held = own_bytes(), Highest() if job.get("hold") else None
    opened_s = time.perf_counter()
    settings = Settings({"budget": job["budget"], "link": "own", "predictor": job.get("predictor", "none")})
    load = {"context": CONTEXT, "threads": job.get("threads", 0), "arithmetic": "fast", "dense": job["dense"]}
    engine = Engine.load(LoadSpec.checked(job["model"], settings, **load))
    loaded_s = time.perf_counter()
    engine.prompt.ends = set()
    count = job["warm"] + job["tokens"]
    ids = engine.prompt.tokens(job["prompt"])
    steps, tokens, first_s, began_s, ended_s, before = [], [], 0.0, 0.0, 0.0, 0
    for piece in engine.generate(job["prompt"], Sampling(temperature=1.0, seed=job["seed"], max_new_tokens=count + 1)):
        if piece.kind != "token":
            continue
        ended_s = time.perf_counter()
        first_s = first_s or ended_s
        tokens.append(piece.token)
        if len(tokens) > job["warm"] + 1 and piece.step is not None:
            steps.append(piece.step)
        elif len(tokens) == job["warm"] + 1:
            began_s, before = ended_s, read_bytes() or 0
    read = (read_bytes() or 0) - before
    memory, slots = engine.memory(), engine.expert_cache.slots
    found = {
        "tok_s": len(steps) / (ended_s - began_s),
        "read_bytes_per_token": read / len(steps),
        "load_s": loaded_s - opened_s,
        "first_token_s": first_s - opened_s,
        "process_s": first_s - STARTED_S,
        "ids": ids,
        "tokens": tokens,
        "slots": slots,
        "blob_bytes": engine.sizes.blob,
        "budget_bytes": memory.budget,
        "used_bytes": memory.peak,
        "decode_threads": engine.manifest()["decode_threads"],
        "model_hash": engine.model_hash,
        **counts(steps, engine.shape.experts, slots),
    }
    if held is not None:
        found["beside_bytes"] = max(0, held.stop() - idle - memory.peak) + children_bytes()
    engine.unload()
    return found


def fit(job: Job) -> Job:
    """The estimate before a pack is loaded, and the memory that the process then takes while its context is filled."""
    from core.capacity.fit import estimate
    from core.engine import Engine
    from core.settings.config import Settings
    from core.settings.loading import LoadSpec
    from core.settings.sampling import Sampling

    spec = LoadSpec.checked(
        job["model"],
        Settings({"budget": job["budget"], "link": "own"}),
        arithmetic="fast",
        dense=job["dense"],
        context=job["context"],
    )
    estimated = estimate(spec)
    before, held = own_bytes(), Highest()
    engine = Engine.load(spec)
    engine.prompt.ends, text = set(), job["prompt"]
    while engine.count_tokens(text + job["prompt"]) < job["context"] - FILL_TOKENS:
        text += job["prompt"]
    for _ in engine.generate(text, Sampling(max_new_tokens=FILL_TOKENS)):
        pass
    found = {
        "estimated_bytes": estimated.budget + estimated.host,
        "counted_bytes": engine.memory().peak,
        "taken_bytes": held.stop() - before,
        "prompt_tokens": engine.count_tokens(text),
    }
    engine.unload()
    return found


def counts(steps: list[Any], experts: int, slots: int) -> Job:
    """The engine's records, per token, and the router's spread."""
    import numpy as np

    from bench.harness.figures import belady_misses_per_token

    def mean(name: str) -> float:
        return float(sum(getattr(step, name) for step in steps)) / len(steps)

    routed = np.concatenate([step.ids for step in steps], axis=1)  # [L, tokens, k]
    again = [
        len(set(a) & set(b)) / len(a) for layer in routed.tolist() for a, b in zip(layer[1:], layer[:-1], strict=True)
    ]
    return {
        "hit_rate": sum(s.hits for s in steps) / sum(s.requests for s in steps),
        "disk_bytes_per_token": mean("disk_bytes"),
        "disk_misses_per_token": mean("disk_misses"),
        "compute_ms": mean("compute_ms"),
        "stall_ms": mean("stall_ms"),
        "idle_ms": mean("idle_ms"),
        "copy_ms": mean("copy_ms"),
        "total_ms": mean("total_ms"),
        "belady_misses_per_token": belady_misses_per_token(routed, experts, slots),
        "repeats_of_previous_token": sum(again) / max(1, len(again)),
    }


def plain(job: Job) -> Job:
    """Milliseconds of decoding with each of transformers' experts implementations and numbers of threads."""
    import torch

    from bench.speed.plain import IMPLEMENTATIONS, Plain

    model = Plain(Path(job["model"]), torch.bfloat16, torch.device("cpu"))
    runs = []
    for implementation in IMPLEMENTATIONS:
        for threads in job["threads"]:
            passes = model.decode(job["ids"], job["warm"] + job["count"], implementation, threads, job["tokens"])[
                job["warm"] :
            ]
            runs.append(
                {"implementation": implementation, "threads": threads, "tok_s": 1e3 * len(passes) / sum(passes)}
            )
    return {"runs": runs}


if __name__ == "__main__":
    take_part(prepare)
