"""The engine's logits are transformers' own, in every bit, whatever the budget, policy or history."""

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from core.engine import Engine
from core.errors import ModelError
from core.hf.cached_pass import cached_pass
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import Ids
from tests.checkpoints import ARCHITECTURES, EXTRA, MORE, make_checkpoint
from tests.decoded import greedy
from tests.equality.conftest import Reference
from tests.equality.passes import PROMPT, plain_transformers, run
from tests.loaded import loaded, unloading
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

CASES = {
    "all": {"budget": "all"},
    "half": {"budget": "50%"},
    "half, one pool": {"budget": "50%", "scope": "global"},
    "top_k slots a layer": {"budget": "top_k a layer"},
    "top_k slots in all": {"budget": "top_k in all", "scope": "global"},
    "no cache": {"budget": "50%", "eviction": "none"},
    "emulated link": {"budget": "50%", "link": "emulated", "link_gbps": 1.0, "link_latency_us": 5},
}
OFTEN = {
    ("qwen3_moe", "no cache"),
    ("qwen3_moe", "emulated link"),
    ("gpt_oss", "top_k slots in all"),
    ("deepseek_v3", "half"),
}


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    """Those that were loaded, by architecture."""
    loaded: dict[str, Engine] = {}
    yield loaded
    for engine in loaded.values():
        engine.unload()


@pytest.fixture
def engine(reference: Reference, engines: dict[str, Engine]) -> Engine:
    if reference.arch not in engines:
        spec = LoadSpec.checked(str(reference.path), Settings({"budget": "all"}), dtype="float32")
        engines[reference.arch] = Engine.load(spec)
    return engines[reference.arch]


def settings_of(engine: Engine, case: dict[str, object], predictor: str) -> dict[str, object]:
    """The case's settings, with budgets in slots turned into bytes; everything else at its default."""
    shape, budget = engine.shape, str(case["budget"])
    slots = {"top_k a layer": shape.top_k * shape.layers, "top_k in all": shape.top_k}.get(budget)
    if slots is not None:
        case = {**case, "budget": str(engine.sizes.bytes(slots))}
    return {**Settings(), **case, "predictor": predictor}


@pytest.mark.parametrize(
    ("reference", "case", "turn"),
    layered(itertools.product(ARCHITECTURES, CASES, (0, 1)), quick=lambda case: case[2] == 0 and case[:2] in OFTEN),
    indirect=["reference"],
)
def test_logits_are_identical(engine: Engine, reference: Reference, case: str, turn: int) -> None:
    """Every pair of architecture, case and predictor; with the second turn, all of them with all.

    What a case changes is the same in every architecture, so that most have only the hardest at once.
    """
    predictor = ("none", "gate")[(list(ARCHITECTURES).index(reference.arch) + list(CASES).index(case) + turn) % 2]
    engine.change(settings_of(engine, CASES[case], predictor))
    logits, tokens = run(engine.model, engine.fresh_cache(), lambda step: None)
    engine.expert_cache.check_integrity()
    assert (logits - reference.logits).abs().max().item() == 0.0
    assert tokens == reference.tokens
    assert engine.memory().used <= engine.memory().budget


@pytest.mark.parametrize("reference", layered(ARCHITECTURES, quick=lambda arch: arch == "deepseek_v3"), indirect=True)
def test_logits_are_identical_while_everything_is_turned_between_tokens(engine: Engine, reference: Reference) -> None:
    engine.change(settings_of(engine, CASES["all"], "none"))
    sizes = []

    def turn(step: int) -> None:
        engine.change(
            {
                "budget": ["all", "50%", "62.5%", "75%"][step % 4],
                "scope": ["layer", "global"][step // 4 % 2],
                "eviction": ["lru", "lfu", "random", "none"][step // 3 % 4],
                "predictor": ["none", "gate"][step // 2 % 2],
                "link": ["own", "emulated"][step // 5 % 2],
            }
        )
        engine.expert_cache.check_integrity()
        assert engine.memory().used <= engine.memory().budget
        sizes.append(len(engine.wiring.arena))

    logits, tokens = run(engine.model, engine.fresh_cache(), turn)
    assert (logits - reference.logits).abs().max().item() == 0.0
    assert tokens == reference.tokens
    assert len(set(sizes)) == 4  # the slider really moved memory


def test_generate_says_what_transformers_says(engine: Engine, reference: Reference) -> None:
    engine.change(settings_of(engine, CASES["half"], "gate"))
    prompt = engine.prompt.tokenizer.decode(PROMPT)
    if engine.prompt.tokens(prompt) != PROMPT:  # bytes that are not text on their own: go in as ids
        engine.prompt.tokens = lambda messages, context: PROMPT  # type: ignore[method-assign]
    pieces = list(engine.generate(prompt, Sampling(max_new_tokens=len(reference.tokens))))
    assert [p.token for p in pieces if p.kind == "token"] == reference.tokens
    stats = pieces[-1].stats
    assert stats.exact
    assert stats.device_bytes_peak <= max(stats.budget_bytes, engine.sizes.bytes(engine.shape.total))


@pytest.mark.parametrize("reference", layered(ARCHITECTURES, quick=lambda arch: arch == "gpt_oss"), indirect=True)
def test_bfloat16_is_identical_too(reference: Reference) -> None:
    plain = plain_transformers(reference.path, torch.bfloat16)
    want, _ = run(plain, DynamicCache(config=plain.config), lambda step: None)
    with loaded(reference.path, {"budget": "50%"}, dtype="bfloat16") as engine:
        got, _ = run(engine.model, engine.fresh_cache(), lambda step: None)
        assert (got - want).abs().max().item() == 0.0


TOKENS = 700
QUICK_LONG = (("qwen3_moe", "bfloat16"),)
LONG = (*QUICK_LONG, ("gpt_oss", "float32"), ("mixtral", "bfloat16"), ("phimoe", "float32"), ("jamba", "bfloat16"))


@pytest.mark.parametrize(("arch", "dtype"), layered(LONG, quick=lambda case: case in QUICK_LONG))
def test_a_long_prompt_is_identical(arch: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for module in ("core.runtime.expert_math", "core.capacity.sizes"):
        monkeypatch.setattr(f"{module}.AT_ONCE", (10_000, 10_000))
    monkeypatch.setattr("core.capacity.sizes.WORTH_SHARED", 1e6)  # of these tiny experts
    path = save_tokenizer(make_checkpoint(arch, tmp_path / arch, max_position_embeddings=1024))
    ids = torch.randint(3, 250, (TOKENS,), generator=torch.Generator().manual_seed(2)).tolist()
    plain = plain_transformers(path, getattr(torch, dtype))
    cache = DynamicCache(config=plain.config)
    with torch.inference_mode():
        want = cached_pass(plain, torch.tensor([ids]), cache, logits_to_keep=1).logits[0, -1]
    engine = Engine.load(LoadSpec.checked(str(path), Settings({"budget": "50%"}), dtype=dtype, context=800))
    found: list[torch.Tensor] = []
    try:
        assert engine.sizes.chunk >= TOKENS
        pieces = list(engine.generate(Ids(ids), Sampling(max_new_tokens=1), draw=greedy(found)))
        (step,) = [piece.step for piece in pieces if piece.kind == "prefill" and piece.step is not None]
        assert torch.equal(found[0], want)
        assert step.hits < step.requests
        assert step.demand_bytes == engine.sizes.blob * (step.requests - step.hits)
        engine.expert_cache.check_integrity()
    finally:
        engine.unload()


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
