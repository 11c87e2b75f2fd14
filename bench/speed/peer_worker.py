"""The other programs' side of benches: one process with one file of a model, in the Python that has their wheels.

The job is {"peer", "model": its file, "threads", "mmap"} and the program's own switches; the model is opened at the
first request, as the memory limit is set before. A request is {"prompt": ids, "tokens": ids, "cap_s": seconds or none}:
read the prompt, then compute the tokens one at a time, no more of them after `cap_s` -> {"prompt_s", "token_s",
"token_bytes", read from disk for a token}; or {"text": ids} -> {"log_probabilities"} after each of them."""

import math
import time
from collections.abc import Callable
from typing import Any

from bench.harness.protocol import Job, read_bytes, take_part

CONTEXT = 2048


class Ik:
    """ik_llama.cpp by its C interface."""

    def __init__(self, model: str, threads: int, mmap: bool, repack: bool = False, flash: bool = True) -> None:
        """`repack`: weights are put into the order that its kernels like best; `flash`: its flash attention."""
        from ik_llama_cpp import _ctypes_api as c  # type: ignore[import-not-found]
        from ik_llama_cpp._internals import make_batch_range  # type: ignore[import-not-found]

        self._c, self._batch, self._at = c, make_batch_range, 0
        c.llama_backend_init()
        params = c.llama_model_default_params()
        params.use_mmap, params.repack_tensors, params.n_gpu_layers = mmap, repack, 0
        self._model = c.llama_model_load_from_file(model.encode(), params)
        context = c.llama_context_default_params()
        context.n_ctx = context.n_batch = CONTEXT
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn = flash
        self._context = c.llama_init_from_model(self._model, context) if self._model else None
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp cannot open {model}")
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))

    def forget(self) -> None:
        self._c.llama_kv_cache_clear(self._context)
        self._at = 0

    def feed(self, ids: list[int]) -> float:
        """Seconds of computing some more positions, up to the logits of the last."""
        began_s = time.perf_counter()
        batch = self._batch(ids, pos_start=self._at)
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("ik_llama.cpp could not decode")
        self._c.llama_get_logits_ith(self._context, -1)[0]
        seconds = time.perf_counter() - began_s
        self._c.llama_batch_free(batch)
        self._at += len(ids)
        return seconds

    def log_probabilities(self, token: int) -> list[float]:
        """[V] after one more position."""
        self.feed([token])
        logits = self._c.llama_get_logits_ith(self._context, -1)[: self._vocabulary]
        most = max(logits)
        norm = most + math.log(math.fsum(math.exp(one - most) for one in logits))
        return [one - norm for one in logits]


class Llama:
    """llama.cpp by the server of its wheel, called in the process: the interface that it has on every system. It takes
    token ids, keeps those that it has read, and times itself."""

    def __init__(self, model: str, threads: int, mmap: bool) -> None:
        import xllamacpp  # type: ignore[import-not-found]

        params, modes = xllamacpp.CommonParams(), xllamacpp.llama_load_mode
        params.model.path, params.n_ctx, params.n_batch, params.n_ubatch = model, CONTEXT, CONTEXT, 512
        params.n_parallel, params.n_gpu_layers, params.warmup = 1, 0, not mmap
        params.load_mode = modes.LLAMA_LOAD_MODE_MMAP if mmap else modes.LLAMA_LOAD_MODE_NONE
        params.no_extra_bufts = mmap  # weights in an order of its own are a copy, which is no file's page
        params.cache_ram_mib = params.n_ctx_checkpoints = 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server, self._ids = xllamacpp.Server(params), list[int]()

    def forget(self) -> None:
        self._ids = []

    def feed(self, ids: list[int]) -> float:
        """Seconds of computing some more positions, up to the first likely token after them."""
        return float(self._asked(ids)["timings"]["prompt_ms"] / 1e3)

    def log_probabilities(self, token: int) -> list[float]:
        """[V] after one more position; none where the end of the text is likeliest, after which it tells none."""
        found = self._asked([token], n_probs=1 << 20)["choices"][0]["logprobs"]
        if found is None:
            return []
        [one] = found["content"]
        return [each["logprob"] for each in sorted(one["top_logprobs"], key=lambda each: each["id"])]

    def _asked(self, ids: list[int], **more: Any) -> Job:
        known, self._ids = bool(self._ids), self._ids + ids
        asked = {"prompt": self._ids, "n_predict": 1, "temperature": 0, "cache_prompt": known, **more}
        answer: Job = self._server.handle_completions(asked)
        if (read := answer["timings"]["prompt_n"]) != len(ids):
            raise RuntimeError(f"llama.cpp computed {read} positions in place of {len(ids)}")
        return answer


PROGRAMS: dict[str, Any] = {"ik": Ik, "llama": Llama}


def timed(program: Any, prompt: list[int], tokens: list[int], cap_s: float | None = None) -> Job:
    program.forget()
    found: Job = {"prompt_s": program.feed(prompt), "token_s": []}
    before, until_s = read_bytes() or 0, time.perf_counter() + (cap_s or math.inf)
    for token in tokens:
        found["token_s"].append(program.feed([token]))
        if time.perf_counter() > until_s:
            break
    return {**found, "token_bytes": ((read_bytes() or 0) - before) / max(1, len(found["token_s"]))}


def prepare(job: Job) -> Callable[[Job], Job]:
    program, opened = PROGRAMS[job["peer"]], list[Any]()
    __import__({"ik": "ik_llama_cpp", "llama": "xllamacpp"}[job["peer"]])

    def measure(request: Job) -> Job:
        if not opened:
            opened.append(program(**{name: of for name, of in job.items() if name not in ("peer", "group")}))
        if "text" not in request:
            return timed(opened[0], **request)
        opened[0].forget()
        return {"log_probabilities": [opened[0].log_probabilities(token) for token in request["text"]]}

    return measure


if __name__ == "__main__":
    take_part(prepare)
