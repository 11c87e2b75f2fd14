"""llama.cpp's side of `bench tiers` and `bench prefill`: runs in any Python that has llama_cpp, and imports only
`bench.harness.protocol`."""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable
from typing import Any

from bench.harness.protocol import Job, read_bytes, take_part

CONTEXT = 512


class Llama:
    """One model through llama.cpp's C interface, memory-mapped."""

    def __init__(self, path: str, repack: bool, most: int = CONTEXT) -> None:
        """`most` = tokens of a context, which one batch may have."""
        self._c = llama_cpp = library()
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = 0, repack
        if hasattr(params, "use_mmap"):
            params.use_mmap = True
        else:
            params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        context = llama_cpp.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = most
        self._context = llama_cpp.llama_init_from_model(self._model, context) if self._model else None
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot open {path}")
        self._vocab = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def threads(self, decode: int, prompt: int) -> None:
        self._c.llama_set_n_threads(self._context, decode, prompt)

    def forget(self) -> None:
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), True)

    def feed(self, tokens: list[int]) -> None:
        """Computes some more positions."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        if self._c.llama_decode(self._context, self._c.llama_batch_get_one(array, len(tokens))):
            raise RuntimeError("llama.cpp could not decode")

    def logits(self) -> list[float]:
        """[vocab] logits of the last position."""
        return list(self._c.llama_get_logits_ith(self._context, -1)[: self._vocab])


QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


def library() -> Any:
    """llama_cpp with its logging switched off."""
    found: Any = importlib.import_module("llama_cpp")
    found.llama_log_set(QUIET, ctypes.c_void_p(0))
    found.llama_backend_init()
    return found


def prepare(job: Job) -> Callable[[], Job]:
    version = {"version": library().__version__}
    return lambda: {
        **version,
        **{"quantize": quantize, "logits": logits, "decode": decode, "prefill": prefill}[job["kind"]](job),
    }


def quantize(job: Job) -> Job:
    """Writes the Q4_K_M of a BF16 file."""
    llama_cpp = library()
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = job["threads"][-1], llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M
    if llama_cpp.llama_model_quantize(job["source"].encode(), job["target"].encode(), ctypes.byref(params)):
        raise RuntimeError("llama.cpp could not quantize")
    return {}


def logits(job: Job) -> Job:
    """The logits after every token of a text, to compare the file with transformers."""
    model = Llama(job["model"], repack=False)
    rows = []
    for token in job["ids"]:
        model.feed([token])
        rows.append(model.logits())
    return {"logits": rows}


def decode(job: Job) -> Job:
    """Seconds of decoding `tokens` after `ids`, for each number of threads, at most about `cap_s` each; the first
    `warm` tokens do not count. The tokens are given, so that every system computes the same."""
    began_s = time.perf_counter()
    model = Llama(job["model"], job["repack"])
    opened_s, prompt_s, runs = time.perf_counter() - began_s, 0.0, []
    for threads in job["threads"]:
        model.threads(threads, job["threads"][-1])
        model.forget()
        model.feed(job["ids"])
        prompt_s = prompt_s or time.perf_counter() - began_s
        started_s, before, times = time.perf_counter(), 0, []
        for number, token in enumerate(job["tokens"]):
            if number == job["warm"]:
                before = read_bytes() or 0
            token_s = time.perf_counter()
            model.feed([token])
            if number >= job["warm"]:
                times.append(time.perf_counter() - token_s)
                if time.perf_counter() - started_s > job["cap_s"]:
                    break
        runs.append({"threads": threads, "seconds": times, "read_bytes": (read_bytes() or 0) - before})
    return {"runs": runs, "opened_s": opened_s, "first_token_s": prompt_s}


def prefill(job: Job) -> Job:
    """Seconds of reading each of the `prompts`, after a warm-up with the first; all weights in memory, and repacked
    where llama.cpp has a better order for this machine."""
    model, seconds = Llama(job["model"], repack=True, most=job["context"]), []
    model.threads(job["threads"], job["threads"])
    for ids in (job["prompts"][0], *job["prompts"]):
        model.forget()
        began_s = time.perf_counter()
        model.feed(ids)
        model.logits()
        seconds.append(time.perf_counter() - began_s)
    return {"seconds": seconds[1:]}


if __name__ == "__main__":
    take_part(prepare)
