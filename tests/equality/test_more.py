"""More architectures on fewer cases: prompts in chunks, decode, answers that are broken off, fp32 and bf16.

Among them are what the first ten have not: short convolutions, linear attention, sliding windows shorter than the
prompt, selected positions, dense layers between MoE layers.
"""

import threading
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.engine import Engine
from core.errors import ModelError
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.checkpoints import EXTRA, MORE, make_checkpoint
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.loaded import unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CHUNKS = (10, 9, 5)  # of the prompt: longer than a convolution, shorter than a window, and the other way round
STEPS = 8
STATEFUL = layered(
    ("lfm2_moe", "qwen3_next", "nemotron_h", "jamba", "inkling_text", "deepseek_v32"),
    quick=lambda arch: arch == "qwen3_next",
)
KNOWN = [arch for arch in EXTRA | MORE if arch in CONFIG_MAPPING]  # older versions of transformers have not all


# Kinds of memory between tokens: linear attention behind a convolution, state spaces, selected positions.
QUICK = ("granitemoehybrid",)


@pytest.fixture(scope="module", params=layered(KNOWN, quick=lambda arch: arch in QUICK))
def arch(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(arch: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return save_tokenizer(make_checkpoint(arch, tmp_path_factory.mktemp(arch)))


def load(path: Path, dtype: str, context: int = 0, sequences: int = 1) -> Engine:
    """The engine, or a skip where an older transformers builds this architecture without a router of its own."""
    try:
        settings = Settings({"budget": "50%"})
        return Engine.load(LoadSpec.checked(str(path), settings, dtype=dtype, context=context, sequences=sequences))
    except ModelError as error:
        if Version(transformers.__version__) >= Version("5.23"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("turn", layered((0, 1), quick=lambda turn: turn == 0))
def test_chunks_and_decode_are_identical(arch: str, path: Path, turn: int) -> None:
    """Every architecture in one number type; with the second turn, in both."""
    dtype = ("float32", "bfloat16")[(KNOWN.index(arch) + turn) % 2]
    plain = plain_transformers(path, getattr(torch, dtype))
    want, tokens = run(plain, DynamicCache(config=plain.config), lambda step: None, STEPS, CHUNKS)
    with unloading(load(path, dtype)) as engine:
        budgets = ["50%", str(engine.sizes.bytes(engine.shape.top_k))]
        for settings in ({"predictor": "gate"}, {"budget": budgets[1], "scope": "global", "predictor": "none"}):
            engine.change(settings)
            logits, said = run(engine.model, engine.fresh_cache(), lambda step: None, STEPS, CHUNKS)
            assert (logits - want).abs().max().item() == 0.0
            assert said == tokens
            assert engine.memory().kv == engine.sizes.kv == engine.memory().kv_reserved
            assert engine.memory().used <= engine.memory().budget
            engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
@pytest.mark.parametrize("arch", STATEFUL, indirect=True)
def test_an_answer_broken_off_leaves_no_trace_in_the_next(
    arch: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.capacity.sizes.PREFILL_CHUNK", 8)
    engine = load(path, "float32", context=128)
    monkeypatch.setattr(engine.prompt, "tokens", lambda messages, context: PROMPT)
    sampling = Sampling(max_new_tokens=STEPS)
    try:
        whole = arch == "jamba"  # transformers' own layers do not go on from the state of the chunk before
        assert engine.sizes.chunk == (128 if whole else 8)
        plain = plain_transformers(path, torch.float32)
        _, want = run(plain, DynamicCache(config=plain.config), lambda step: None, STEPS, (24,) if whole else (8, 8, 8))
        for last in ("prefill", "token", "end"):  # where the answer before ends: within the prompt, later, never
            cancel = threading.Event()
            for piece in engine.generate("", sampling, cancel):
                if piece.kind == last:
                    cancel.set()
            assert piece.stats.reason == ("length" if last == "end" else "cancelled")
            dropped = engine.generate("", sampling)
            next(dropped)
            dropped.close()
            assert [p.token for p in engine.generate("", sampling) if p.kind == "token"] == want
            assert engine.memory().kv == engine.sizes.kv
    finally:
        engine.unload()
