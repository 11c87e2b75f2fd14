"""`python -m tests.memory.interpret interpreted_program[:ARCHITECTURE,...]`: whole models on the emulated GPU in the
fast arithmetic, whose kernels Triton's interpreter runs, against the same models on this CPU, as {case: how many logits
differ}. tests/gpu/test_fast.py has a real GPU compute them."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from core.engine import Engine
from core.runtime.batch import Batch, Share
from core.runtime.device_step import DeviceStep
from core.runtime.kv_cache import KVCache
from core.runtime.program.gpu.rows import GpuRows
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from tests.architectures.tiny import tiny
from tests.checkpoints import make_checkpoint
from tests.fake_cuda import FakeCuda, installed
from tests.fake_cuda.graphs import FakeGraph
from tests.fake_cuda.interpreter import Interpreter
from tests.loaded import unloading
from tests.memory.interpreted_layer import differing
from tests.tiny_tokenizer import save_tokenizer

CONTEXT = 96
TEXT = torch.randint(3, 120, (6,), generator=torch.Generator().manual_seed(1)).tolist()
Cut = int | tuple[int, int]  # tokens of a piece, and how many of them are taken back, as guesses that were wrong
CUTS: dict[str, Sequence[list[Cut]]] = {  # pieces of the text, by the share of experts in slots
    "100%": ([6], [3, 2, 1]),
    "50%": ([3, 1, (2, 1), 1],),
}
FEW: dict[str, Sequence[list[Cut]]] = {"50%": ([3, 1],)}
OTHERWISE: dict[str, tuple[type, str, dict[str, object]]] = {  # and what must have been called
    "on the host": (GpuRows, "join", {"miss_placement": "host", "host_threads": 0}),
    "by ids": (DeviceStep, "__call__", {"gpu_decode": "device"}),
    "as a graph": (FakeGraph, "replay", {"gpu_decode": "graph"}),
}
LAST: dict[str, Sequence[list[Cut]]] = {
    "50%": ([2, 1, 1, 1, 1],)
}  # the first token is captured, a replay agrees with the second, others are used
SMALL: dict[str, Any] = dict(num_hidden_layers=2, num_experts_per_tok=2)
BF16 = {"dtype": "bfloat16"}
EXPERTS: dict[str, Any] = dict(num_experts=4, num_local_experts=4, n_routed_experts=4)  # by whatever name
BIASED: dict[str, Any] = dict(attention_bias=True, intermediate_size=32)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what is changed of a tiny model, and how it is loaded
    "qwen3_moe": ({"moe_intermediate_size": 32}, {"format": "int4-g32", **BF16}),
    "qwen2_moe": (
        {"mlp_only_layers": [1], "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        {"format": "int8-g32", **BF16},
    ),
    "mixtral": ({"intermediate_size": 40}, {"format": "checkpoint", "dtype": "float32"}),
    "olmoe": (BIASED, {"format": "mxfp4", **BF16}),
    "gpt_oss": ({**BIASED, "sliding_window": 4}, {"format": "int8-g32", **BF16}),
    "granitemoe": (
        {"intermediate_size": 32, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0},
        {"format": "int4-g32", **BF16},
    ),
    "flex_olmo": ({"intermediate_size": 32}, {"format": "int4-g32", **BF16}),
    "granitemoeshared": ({"shared_intermediate_size": 32}, {"format": "checkpoint", **BF16}),
    "afmoe": (
        {"num_dense_layers": 1, "moe_intermediate_size": 32, "sliding_window": 4},
        {"format": "int4-g32", "dense": "int4-g32", **BF16},
    ),
    "laguna": ({"moe_intermediate_size": 32}, {"format": "int8-g32", **BF16}),
    "gemma4_text": (
        {
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "intermediate_size": 64,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "final_logit_softcapping": 30.0,
        },
        {"format": "int4-g32", **BF16},
    ),
    "qwen3_next": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        {"format": "int4-g32", **BF16},
    ),
    "qwen3_5_moe_text": (
        {
            "layer_types": ["linear_attention", "full_attention"],
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        {"format": "int8-g32", "dense": "int8-g32", **BF16},
    ),
    "deepseek_v3": (
        {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32},
        {"format": "int4-g32", "dense": "int4-g32", **BF16},
    ),
    "deepseek_v2": (
        {
            "n_group": 2,
            "topk_method": "group_limited_greedy",
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "moe_intermediate_size": 32,
        },
        {"format": "checkpoint", "dtype": "float32"},
    ),
    "glm4_moe_lite": ({"n_group": 1, "topk_group": 1, "moe_intermediate_size": 32}, {"format": "mxfp4", **BF16}),
    "glm4_moe": (
        {"n_group": 2, "topk_group": 1, "moe_intermediate_size": 32},
        {"format": "int4-g32", "dense": "int4-g32", **BF16},
    ),
}


@contextmanager
def emulated() -> Iterator[FakeCuda]:
    """The emulated GPU, with the interpreter in the place of its kernels, and short trials at a load."""
    with installed(FakeCuda()) as fake, pytest.MonkeyPatch.context() as patch:
        interpreter = Interpreter(fake)
        patch.setattr("core.engine.pass_wiring.launcher_for", lambda device: interpreter)
        patch.setattr("core.hf.quantized_linear.available", lambda device: True)
        patch.setattr("core.engine.pass_wiring.PREFILL_CHUNK", 2)
        patch.setattr("core.engine.program_trial.TRIED", 3)
        few_are_tiled(patch)
        yield fake
    assert interpreter.launches and not fake.races.found, fake.races.found[:3]


def few_are_tiled(patch: pytest.MonkeyPatch) -> None:
    """Some of the pieces of TEXT are then many rows, which tensor cores multiply."""
    patch.setattr("core.memory.codec.fast.gpu.dense.TILED", 4)
    patch.setattr("core.runtime.program.gpu.rows.TILED", 2)


Gpu = Callable[[], AbstractContextManager[object]]


def found(which: str) -> dict[str, int]:
    """What differs for some architectures, or for one in one of the ways of OTHERWISE ("glm4_moe_lite/as a graph"), or
    of a token after three others where none is named, also by these ways."""
    if which:
        arch, _, how = which.partition("/")
        if how:
            return otherwise(arch, how)
        each = {arch: compared(arch, CUTS) for arch in which.split(",")}
        return {f"{arch} {case}": count for arch, one in each.items() for case, count in one.items()}
    differ = compared("qwen3_moe", FEW, settings={"gpu_decode": "host"}, num_hidden_layers=1)
    for how in OTHERWISE:
        differ |= otherwise("qwen3_moe", how, num_hidden_layers=1)
    return differ


def otherwise(arch: str, how: str, **more: int) -> dict[str, int]:
    """What differs in one of the ways of OTHERWISE, which is asserted to have been taken."""
    kind, name, settings = OTHERWISE[how]
    with pytest.MonkeyPatch.context() as patch:
        calls = counted(patch, kind, name)
        differ = compared(arch, LAST, settings=settings, **more)
    assert len(calls) >= (3 if kind is FakeGraph else 1), how
    return {f"{case} {how}": count for case, count in differ.items()}


def counted(patch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    calls, method = list[str](), getattr(kind, name)

    def call(*given: Any) -> Any:
        calls.append(name)
        return method(*given)

    patch.setattr(kind, name, call)
    return calls


def compared(
    arch: str,
    pieces: Mapping[str, Sequence[list[Cut]]],
    gpu: Gpu = emulated,
    settings: Mapping[str, object] | None = None,
    **more: int,
) -> dict[str, int]:
    """A model on both, with so many experts in slots, in such pieces."""
    fields, how = CASES[arch]
    named = tiny(arch)
    experts = {name: count for name, count in EXPERTS.items() if name in named}
    with tempfile.TemporaryDirectory() as folder:
        path = save_tokenizer(make_checkpoint(arch, Path(folder), **{**SMALL, **experts, **fields, **more}))
        wanted: dict[tuple[Cut, ...], torch.Tensor] = {}
        with unloading(load(path, "100%", "cpu", how)) as engine:
            for each in {tuple(cut) for cuts in pieces.values() for cut in cuts}:
                wanted[each] = logits(engine, each)
            both = together(engine)
        differ = {}
        for budget, cuts in pieces.items():
            with gpu(), unloading(load(path, budget, "cuda", how, settings or {})) as engine:
                hooked = engine.wiring.answering.hooked
                assert hooked.program is not None and engine.arithmetic.name == "fast", engine.arithmetic
                for cut in cuts:
                    differ[f"{budget} {cut}"] = differing(logits(engine, cut), wanted[tuple(cut)])
                if budget == "100%":
                    differ["100% two texts"] = differing(together(engine), both)
        return differ


def load(
    path: Path, budget: str, device: str, how: Mapping[str, object], more: Mapping[str, object] | None = None
) -> Engine:
    settings = {"budget": budget, "predictor": "none"} | ({"link": "own"} if device == "cpu" else {**(more or {})})
    chosen = {"arithmetic": "fast", "context": CONTEXT, "device": device, **how}
    return Engine.load(LoadSpec.checked(str(path), Settings(settings), **chosen))


def logits(engine: Engine, cuts: Sequence[Cut]) -> torch.Tensor:
    wiring, at, rows = engine.wiring, 0, []
    kv, pipeline = wiring.pool.take(CONTEXT), wiring.answering
    assert kv is not None
    try:
        for cut in cuts:
            count, back = cut if isinstance(cut, tuple) else (cut, 0)
            batch = Batch("decode" if count == 1 or back else "prefill", (Share(TEXT[at : at + count], kv, 1),))
            pipeline.begin(batch)
            rows.append(pipeline.forward(batch, count).cpu())
            kv.memory.take_back(kv, back)
            at += count - back
        return torch.cat(rows)
    finally:
        pipeline.end()
        wiring.pool.clear()


def together(engine: Engine) -> torch.Tensor:
    """[rows, V] of the beginnings of two texts in one pass, and then of a token each: of two rows, and one."""
    rows, pipeline = [], engine.wiring.answering
    memories = [KVCache(engine.model, CONTEXT) for _ in range(2)]  # in a pool there may be room for one
    kvs = [memory.fresh() for memory in memories]
    try:
        for phase, parts, keep in (("prefill", (TEXT[:3], TEXT[3:5]), 2), ("decode", (TEXT[3:4], TEXT[5:]), 1)):
            shares = tuple([Share(part, kv, n) for n, (part, kv) in enumerate(zip(parts, kvs, strict=True), 1)])
            batch = Batch("prefill" if phase == "prefill" else "decode", shares)
            pipeline.begin(batch)
            rows.append(pipeline.forward(batch, keep).cpu())
        return torch.cat(rows)
    finally:
        pipeline.end()
        for memory in memories:
            memory.release()
