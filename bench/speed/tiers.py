"""bench tiers: a model read from disk within a memory budget, against everything resident, transformers, ik_llama.cpp
and llama.cpp.

Every measurement is a process of its own that starts with the model's files out of the page cache. A round measures
every system once on the same tokens. Below 100 % every process is limited to the budget's bytes and its memory without
a model, page cache included."""

import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.harness import process
from bench.harness.process import MemoryGroup, ended_well
from bench.harness.protocol import Job
from bench.harness.run import RESIDENT, Result, Run, Suite, chosen
from bench.models import fixtures
from bench.models.fixtures import DENSE, FORMATS, PROMPT, Fixtures
from bench.models.peers import NAMES, Peer
from bench.models.peers import WORKER as PEER
from bench.models.sizes import FULL, SMALL
from bench.speed.fidelity import About, Fidelity
from bench.speed.plain import Plain
from bench.speed.tiers_result import Runs, result, routing, table
from core.capacity.plan import plan
from core.errors import MoestroError
from core.settings.config import Settings
from core.settings.loading import LoadSpec

WARM = 8  # decode passes before the engine's count
KERNEL_BYTES = 16 << 20  # of the system's own for a process (page tables, stacks), which its group is charged with
PEER_WARM = 2  # ... before other programs' count: under a limit one can take seconds
PEER_CAP_S = 6.0  # of decoding by one of them
PLAIN_TOKENS = 8
CONTEXT = 512
FIT_CONTEXT = 2048  # filled to measure how much memory a process then holds
WORKER = "bench.speed.worker"
LIMIT = (
    "a control group of the process's own: memory.limit_in_bytes (or memory.max) = what the group held after all "
    "imports and before the model was opened + the bytes that Moestro's budget stands for (dense weights, KV "
    "cache, workspace, slots). Page cache counts. The same bytes are added for every system; Moestro's own memory "
    "beside them is taken from its slots."
)


def measure(
    run: Run,
    rounds: int = 3,
    tokens: int = 32,
    formats: str = "bf16,int4",
    budgets: str = "100%,75%,50%,37.5%",
    peers: str = "",
) -> Result:
    """`tokens` = decode passes of the engine a round; `formats`: which of FORMATS; `peers`: as
    `bench.models.peers.agreed`."""
    began_s, load_before = time.perf_counter(), _load()
    built = fixtures.build(run, peers, chosen("format", formats, FORMATS))
    why_unlimited = "the small model is no larger than what processes differ by" if run.small else _why_unlimited()
    imports = fixtures.import_packs(built)
    about = _about(run, built)
    tiers = Tiers(built, budgets.split(","), tokens, not why_unlimited)
    sizes = SMALL if run.small else FULL
    for number in run.rounds(rounds, warm=False):
        tiers.round(number)
    disk = {name: median(values) for name, values in tiers.disk.items()}
    return {
        **result(tiers.runs, tiers.budgets, imports, max(disk.values()), tiers.fits),
        "model": built.model.name,
        "routing": routing(tiers.runs, sizes.top_k / sizes.experts),
        "about": about,
        "cold_cache_method": process.METHOD if hasattr(os, "posix_fadvise") else process.NO_METHOD,
        "stayed_cached_bytes": tiers.stayed,
        "disk_gbps": disk,
        "held_beside_bytes": tiers.beside,
        "memory_limit_method": f"none: {why_unlimited}" if why_unlimited else LIMIT,
        "machine": fixtures.machine(built),
        "load_average": {"before": load_before, "rounds": tiers.loads},
        "took_s": time.perf_counter() - began_s,
    }


def _about(run: Run, built: Fixtures) -> dict[str, dict[str, About]]:
    """By format and system: its file, bits a weight and KL."""
    fidelity = Fidelity(built.model, Plain(built.model, torch.bfloat16, torch.device("cpu")))
    found: dict[str, dict[str, About]] = {}
    for name, pack in built.packs.items():
        load: Any = {"arithmetic": "fast", "dense": DENSE[name], "context": CONTEXT}
        with run.loaded(str(pack), RESIDENT, **load) as engine:
            found[name] = {"moestro": fidelity.of_engine(engine, FORMATS[name])}
        found[name] |= {NAMES[peer.name]: fidelity.of_peer(peer) for peer in built.peers[name]}
    return found


class Tiers:
    """The measurements of a round, and the results so far."""

    def __init__(self, built: Fixtures, budgets: Sequence[str], tokens: int, limited: bool) -> None:
        self.runs = Runs()
        self.stayed = 0
        self.loads: list[float | None] = []
        self.disk: dict[str, list[float]] = {}
        self.fits: dict[str, Job] = {}
        self._fixtures, self._tokens, self._limited = built, tokens, limited
        self._fastest = {peer: peer.fastest(built.say) for of in built.peers.values() for peer in of}
        self.budgets = {name: {budget: self._bytes(name, budget) for budget in budgets} for name in built.packs}
        self.beside = {name: self._held_beside(name) for name in built.packs} if limited else {}

    def _bytes(self, name: str, budget: str) -> int:
        pack, settings = str(self._fixtures.packs[name]), Settings({"budget": budget})
        spec = LoadSpec.checked(pack, settings, context=CONTEXT, dense=DENSE[name])
        return plan(spec).sizes.budget_bytes(spec.settings.cache.budget)

    def round(self, number: int) -> None:
        for threads, gbps in fixtures.disk_gbps(next(iter(self._fixtures.packs.values()))).items():
            self.disk.setdefault(threads, []).append(gbps)
        for name, budgets in self.budgets.items():
            whole: Job = {}
            for budget in budgets:
                limit = self.budgets[name][budget] if self._limited and budget != "100%" else None
                ours = self._ours(name, budget, limit, number)
                whole = whole or ours
                if (name, budget) == ("bf16", "100%"):
                    self._plain(whole)
                elif budget == "100%":
                    self._ours(name, budget, limit, number, "checkpoint")
                if number == 1:
                    self._fit(name, budget)
                for peer in self._fixtures.peers[name] if limit is not None or budget == "100%" else ():
                    self._peer(peer, name, budget, limit, whole)
        self.loads.append(_load())

    def _ours(self, name: str, budget: str, limit: int | None, number: int, dense: str = "") -> Job:
        """One run of the engine. `dense`: format of the layers outside the experts, if other than the usual one."""
        job = self._job(name, budget, number) | ({"dense": dense} if dense else {})
        if limit is not None:
            job["budget"] = str(self.budgets[name][budget] - self.beside[name])
        system = f"moestro, dense layers as in the {dense}" if dense else "moestro"
        found = ended_well(self._measure(system, name, budget, job, limit), f"Moestro in {name} at {budget}")
        self.runs.add(system, name, budget, "", found["tok_s"], found)
        return found

    def _job(self, name: str, budget: str, seed: int) -> Job:
        kernels = str(self._fixtures.folder / "kernels")  # compiled without a limit, as other programs are
        job = {"kind": "moestro", "budget": budget, "prompt": PROMPT, "dense": DENSE[name], "kernels": kernels}
        return job | {"warm": WARM, "tokens": self._tokens, "seed": seed}

    def _held_beside(self, name: str) -> int:
        """Bytes that Moestro holds beside what its budget counts: modules, tokenizer, kernels, the process that renders
        chat templates. The first of two runs compiles the kernels."""
        for _ in range(2):
            job = self._job(name, "100%", 0) | {"hold": True}
            found = ended_well(self._measure("moestro's own memory", name, "100%", job), f"Moestro in {name}")
        return int(found["beside_bytes"]) + KERNEL_BYTES

    def _fit(self, name: str, budget: str) -> None:
        """The fit estimate, and the memory that a process really holds when its whole context is used."""
        job = {"kind": "fit", "budget": budget, "prompt": PROMPT + " ", "dense": DENSE[name], "context": FIT_CONTEXT}
        found = ended_well(self._measure("estimate", name, budget, job), f"Filling a context in {name} at {budget}")
        shown = {key: found[key] for key in ("estimated_bytes", "counted_bytes", "taken_bytes", "prompt_tokens")}
        self.fits[f"{name}, {budget}"] = {**shown, "ratio": found["estimated_bytes"] / found["taken_bytes"]}

    def _plain(self, whole: Job) -> None:
        job = {
            "kind": "transformers",
            "ids": whole["ids"],
            "tokens": whole["tokens"],
            "warm": 1,
            "count": PLAIN_TOKENS,
            "threads": self._fixtures.threads,
        }
        found = ended_well(
            self._measure("transformers", "bf16", "100%", job, file=self._fixtures.model), "transformers"
        )
        for one in found["runs"]:
            variant = f"{one['implementation']}, {one['threads']} thread{'s'[: one['threads'] > 1]}"
            self.runs.add("transformers", "bf16", "100%", variant, one["tok_s"], {})

    def _peer(self, peer: Peer, name: str, budget: str, limit: int | None, whole: Job) -> None:
        """The same tokens by another program: under a limit memory-mapped, else in its fastest configuration."""
        job = peer.job(**({"mmap": True} if limit is not None else self._fastest[peer]))
        request = {"prompt": whole["ids"], "tokens": whole["tokens"], "cap_s": PEER_CAP_S}
        more = {"python": str(peer.python), "request": request}
        system = NAMES[peer.name]
        found = self._measure(system, name, budget, job, limit, module=PEER, file=peer.file, **more)
        seconds = found.pop("token_s", [])[PEER_WARM:]
        if "failed" in found:
            self.runs.failed[system, name, budget] = found["failed"]
        elif not seconds:
            self.runs.failed[system, name, budget] = f"no more than {PEER_WARM} tokens in {PEER_CAP_S:g} s"
        else:
            self.runs.add(system, name, budget, "", len(seconds) / sum(seconds), found)

    def _measure(
        self,
        system: str,
        name: str,
        budget: str,
        job: Job,
        limit: int | None = None,
        module: str = WORKER,
        file: Path | None = None,
        **more: Any,
    ) -> Job:
        """One process with `file`, the pack unless another is given."""
        self._fixtures.say(f"  {system}, {name}, {budget}")
        file = file or self._fixtures.packs[name]
        found = process.measure(module, {"model": str(file), **job}, [file], limit=limit, **more)
        self.stayed += found["stayed_cached"] or 0
        return found


def _why_unlimited() -> str:
    try:
        with MemoryGroup("try"):
            return ""
    except MoestroError as error:
        return str(error)


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


SUITE = Suite(measure, table, small={"rounds": 1, "peers": "none"})
