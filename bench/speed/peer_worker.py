"""The other programs' side of `bench peers`: holds one model, and answers one line of JSON with another until its input
ends. Runs in the Python that has their wheels, and imports nothing of Moestro.

A request is {"prompt": ids, "tokens": ids}: read the prompt, then decode the tokens one at a time -> {"prompt_s",
"token_s"}; or {"text": ids} -> {"logits"} after each of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

Answer = dict[str, Any]
CONTEXT = 2048


class Ik:
    """ik_llama.cpp by its C interface."""

    def __init__(self, path: str, threads: int, repack: bool, flash: bool) -> None:
        """`repack`: weights are put into the order that its kernels like best; `flash`: its flash attention."""
        from ik_llama_cpp import _ctypes_api as c  # type: ignore[import-not-found]
        from ik_llama_cpp._internals import make_batch_range  # type: ignore[import-not-found]

        self._c, self._batch = c, make_batch_range
        c.llama_backend_init()
        model = c.llama_model_default_params()
        model.use_mmap, model.repack_tensors, model.n_gpu_layers = False, repack, 0
        self._model = c.llama_model_load_from_file(path.encode(), model)
        context = c.llama_context_default_params()
        context.n_ctx = context.n_batch = CONTEXT
        context.n_threads = context.n_threads_batch = threads
        context.flash_attn = flash
        self._context = c.llama_init_from_model(self._model, context)
        if not self._context:
            raise RuntimeError(f"ik_llama.cpp cannot open {path}")
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))

    def feed(self, ids: list[int], start: int) -> None:
        """Compute some positions from `start` on, up to the logits of the last."""
        batch = self._batch(ids, pos_start=start)
        if self._c.llama_decode(self._context, batch):
            raise RuntimeError("ik_llama.cpp could not decode")
        self._c.llama_get_logits_ith(self._context, -1)[0]
        self._c.llama_batch_free(batch)

    def timed(self, prompt: list[int], tokens: list[int]) -> Answer:
        self._c.llama_kv_cache_clear(self._context)
        seconds = []
        for at, ids in enumerate([prompt, *([token] for token in tokens)]):
            began_s = time.perf_counter()
            self.feed(ids, len(prompt) + at - 1 if at else 0)
            seconds.append(time.perf_counter() - began_s)
        return {"prompt_s": seconds[0], "token_s": seconds[1:]}

    def logits(self, text: list[int]) -> Answer:
        self._c.llama_kv_cache_clear(self._context)
        rows = []
        for at, token in enumerate(text):
            self.feed([token], at)
            rows.append(list(self._c.llama_get_logits_ith(self._context, -1)[: self._vocabulary]))
        return {"logits": rows}


class LlamaServer:
    """llama.cpp by the server of its wheel, which has no other interface: it takes token ids and times itself, and
    decodes its own likeliest tokens."""

    def __init__(self, path: str, threads: int) -> None:
        import xllamacpp  # type: ignore[import-not-found]

        params = xllamacpp.CommonParams()
        params.model.path, params.n_ctx, params.n_batch, params.n_ubatch = path, CONTEXT, CONTEXT, 512
        params.n_parallel, params.n_gpu_layers, params.warmup, params.cache_prompt = 1, 0, True, False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        self._server = xllamacpp.Server(params)

    def timed(self, prompt: list[int], tokens: list[int]) -> Answer:
        asked = {"prompt": prompt, "n_predict": len(tokens) + 1, "temperature": 0, "ignore_eos": True}
        found = self._server.handle_completions({**asked, "cache_prompt": False})
        times = found["timings"]
        return {"prompt_s": times["prompt_ms"] / 1e3, "token_s": [times["predicted_per_token_ms"] / 1e3]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    job = json.loads(sys.stdin.readline())
    of: Any = {"ik": Ik, "llama": LlamaServer}[job.pop("peer")](**job)
    say({})
    for line in sys.stdin:
        asked = json.loads(line)
        say(of.logits(asked["text"]) if "text" in asked else of.timed(asked["prompt"], asked["tokens"]))


if __name__ == "__main__":
    main()
