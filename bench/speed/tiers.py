"""bench tiers: a model read from disk within a memory budget, against everything resident, transformers and llama.cpp.

Every measurement is a process of its own that starts with the model's files out of the page cache. A round measures
every system once on the same tokens. Below 100 % every process is limited to the budget's bytes and its memory without
a model, page cache included.
"""

from __future__ import annotations

import os
import time
from statistics import median
from typing import Any

from bench.harness import process
from bench.harness.process import MemoryGroup, ended_well
from bench.harness.protocol import Job
from bench.harness.run import Result, Run, Suite
from bench.models import fixtures
from bench.models.fixtures import DENSE, FORMATS, PROMPT, Fixtures
from bench.models.sizes import FULL, SMALL
from bench.speed.tiers_result import Runs, result, routing, table
from core.capacity.plan import plan
from core.errors import MoestroError
from core.settings.config import Settings
from core.settings.loading import LoadSpec

BUDGETS = ("100%", "75%", "50%", "37.5%")
WARM = 8  # decode passes before the engine's count
LLAMA_WARM = 2  # ... before llama.cpp's count: under a limit one can take seconds
LLAMA_CAP_S = 6.0  # of decoding with one number of threads
PLAIN_TOKENS = 8
CONTEXT = 512
FIT_CONTEXT = 2048  # filled to measure how much memory a process then holds
WORKER = "bench.speed.worker"
LIMIT = (
    "a control group of the process's own: memory.limit_in_bytes (or memory.max) = what the group held after all "
    "imports and before the model was opened + the bytes that Moestro's budget stands for (dense weights, KV "
    "cache, workspace, slots). Page cache counts. The same bytes are added for every system."
)


def measure(run: Run, rounds: int = 3, tokens: int = 32, llama: str = "") -> Result:
    """`tokens` = decode passes of the engine a round; `llama` = an interpreter that has llama_cpp."""
    began_s, load_before = time.perf_counter(), _load()
    built = fixtures.build(run.folder(), run.small, llama, run.say)
    why_unlimited = "the small model is no larger than what processes differ by" if run.small else _why_unlimited()
    same = fixtures.check_gguf(built) if built.llama else None
    imports = fixtures.import_packs(built)
    tiers, sizes = Tiers(built, tokens, not why_unlimited), SMALL if run.small else FULL
    for number in run.rounds(rounds, warm=False):
        tiers.round(number)
    disk = {name: median(values) for name, values in tiers.disk.items()}
    return {
        **result(tiers.runs, tiers.budgets, imports, max(disk.values()), tiers.fits),
        "model": built.model.name,
        "routing": routing(tiers.runs, sizes.top_k / sizes.experts),
        "llama_cpp": built.without or "present",
        "llama_cpp_check": same,
        "cold_cache_method": process.METHOD if hasattr(os, "posix_fadvise") else process.NO_METHOD,
        "stayed_cached_bytes": tiers.stayed,
        "disk_gbps": disk,
        "memory_limit_method": f"none: {why_unlimited}" if why_unlimited else LIMIT,
        "machine": fixtures.machine(built),
        "load_average": {"before": load_before, "rounds": tiers.loads},
        "took_s": time.perf_counter() - began_s,
    }


class Tiers:
    """The measurements of a round, and the results so far."""

    def __init__(self, built: Fixtures, tokens: int, limited: bool) -> None:
        self.runs = Runs()
        self.stayed = 0
        self.loads: list[float | None] = []
        self.disk: dict[str, list[float]] = {}
        self.fits: dict[str, Job] = {}
        self._fixtures, self._tokens, self._limited = built, tokens, limited
        self.budgets = {name: {budget: self._bytes(name, budget) for budget in BUDGETS} for name in FORMATS}

    def _bytes(self, name: str, budget: str) -> int:
        pack, settings = str(self._fixtures.packs[name]), Settings({"budget": budget})
        spec = LoadSpec.checked(pack, settings, context=CONTEXT, dense=DENSE[name])
        return plan(spec).sizes.budget_bytes(spec.settings.cache.budget)

    def round(self, number: int) -> None:
        for threads, gbps in fixtures.disk_gbps(self._fixtures.packs["bf16"]).items():
            self.disk.setdefault(threads, []).append(gbps)
        for name in FORMATS:
            whole: Job = {}
            for budget in BUDGETS:
                limit = self.budgets[name][budget] if self._limited and budget != "100%" else None
                ours = self._ours(name, budget, limit, number)
                whole = whole or ours
                if (name, budget) == ("bf16", "100%"):
                    self._plain(whole)
                elif budget == "100%":
                    self._ours(name, budget, limit, number, "checkpoint")
                if number == 1:
                    self._fit(name, budget)
                if self._fixtures.llama and (limit is not None or budget == "100%"):
                    self._llama(name, budget, limit, whole)
        self.loads.append(_load())

    def _ours(self, name: str, budget: str, limit: int | None, number: int, dense: str = "") -> Job:
        """One run of the engine. `dense`: format of the layers outside the experts, if other than the usual one."""
        job = {
            "kind": "moestro",
            "budget": budget,
            "prompt": PROMPT,
            "warm": WARM,
            "tokens": self._tokens,
            "seed": number,
            "dense": dense or DENSE[name],
        }
        system = f"moestro, dense layers as in the {dense}" if dense else "moestro"
        found = ended_well(self._measure(system, name, budget, job, limit), f"Moestro in {name} at {budget}")
        self.runs.add(system, name, budget, "", found["tok_s"], found)
        return found

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
        found = ended_well(self._measure("transformers", "bf16", "100%", job), "transformers")
        for one in found["runs"]:
            variant = f"{one['implementation']}, {_threads(one['threads'])}"
            self.runs.add("transformers", "bf16", "100%", variant, one["tok_s"], {})

    def _llama(self, name: str, budget: str, limit: int | None, whole: Job) -> None:
        """Every number of threads in the first round, then the fastest. Under a limit without repacking weights into
        private memory, which could not be read from the file again; in memory, with and without."""
        known = self.runs.best("llama.cpp", name, budget)
        for repack in (False,) if limit is not None else (False, True):
            threads = [n for n in self._fixtures.threads if known in (None, _variant(n, repack))]
            if not threads:
                continue
            job = {
                "kind": "decode",
                "ids": whole["ids"],
                "tokens": whole["tokens"],
                "warm": LLAMA_WARM,
                "cap_s": LLAMA_CAP_S,
                "threads": threads,
                "repack": repack,
            }
            found = self._measure("llama.cpp", name, budget, job, limit)
            for one in found.get("runs", []):
                seen = {**found, "read_bytes_per_token": one["read_bytes"] / len(one["seconds"])}
                tok_s = len(one["seconds"]) / sum(one["seconds"])
                self.runs.add("llama.cpp", name, budget, _variant(one["threads"], repack), tok_s, seen)
            if "failed" in found:
                self.runs.failed["llama.cpp", name, budget] = found["failed"]

    def _measure(self, system: str, name: str, budget: str, job: Job, limit: int | None = None) -> Job:
        """One process, with the file that the system reads."""
        built, module, more = self._fixtures, WORKER, dict[str, Any]()
        built.say(f"  {system}, {name}, {budget}")
        file = built.model if system == "transformers" else built.packs[name]
        if system == "llama.cpp":
            file, module, more = built.gguf[name], "bench.speed.llama", {"python": built.llama}
        found = process.measure(module, {**job, "model": str(file)}, [file], limit=limit, **more)
        self.stayed += found["stayed_cached"] or 0
        return found


def _variant(threads: int, repack: bool) -> str:
    return _threads(threads) + (", weights repacked" if repack else "")


def _threads(count: int) -> str:
    return f"{count} thread{'s'[: count > 1]}"


def _why_unlimited() -> str:
    try:
        with MemoryGroup("try"):
            return ""
    except MoestroError as error:
        return str(error)


def _load() -> float | None:
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


SUITE = Suite(measure, table, small={"rounds": 1})
