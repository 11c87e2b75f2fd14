"""Kernels on a real GPU: grouped products in every format, whole experts, a token's attention; how fast."""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from core.engine import Engine
from core.hf.attention_launch import AttentionKernels, Shape, exact, tried
from core.importing import import_model
from core.memory.arena import Slot
from core.memory.codec import FORMATS
from core.runtime.expert_math import ExpertMath
from core.runtime.product_trials import objection
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests import kernel_cases as cases
from tests.checkpoints import make_checkpoint
from tests.loaded import unloading
from tests.tiny_tokenizer import save_tokenizer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
DEVICE = torch.device("cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(FORMATS))
def test_products(name: str, dtype: torch.dtype) -> None:
    for transposed in (False, True):
        for bias in (False, True):
            long = cases.odd_inputs(name, long=True)
            assert cases.product_error(name, dtype, DEVICE, transposed, bias) < 1
            assert cases.product_error(name, dtype, DEVICE, transposed, bias, 203, long, count=19) < 1
    assert cases.product_error(name, dtype, DEVICE, False, False, 1536, 2048, count=8) < 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", cases.CODED)
def test_dequantization(name: str, dtype: torch.dtype) -> None:
    assert cases.dequantization_error(name, dtype, DEVICE, transposed=False) < 1
    assert cases.dequantization_error(name, dtype, DEVICE, True, 1536, 2048, count=19) < 1  # in several portions


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("oss", [False, True])
@pytest.mark.parametrize("name", list(FORMATS))
def test_whole_experts(name: str, oss: bool, dtype: torch.dtype) -> None:
    errors = cases.expert_error(name, dtype, DEVICE, oss, hidden=256, inner=384)
    assert not {what: error for what, error in errors.items() if not error < 1}


@pytest.mark.parametrize("name", ["checkpoint", "int4-g64", "mxfp4"])
def test_the_same_inputs_give_the_same_bits(name: str) -> None:
    experts = cases.matrices(8, 512, 1024, transposed=False, bias=False)
    codec = cases.codec_of(name, experts[0], torch.bfloat16, DEVICE, False)
    slots = [slot.raw for slot in cases.slots_of(codec, experts)]
    x = torch.randn(1, 1024, device=DEVICE, dtype=torch.bfloat16)
    kernels = cases.kernels_of(codec)
    first = kernels.multiply("down_proj", slots, x)
    assert all(torch.equal(first, kernels.multiply("down_proj", slots, x)) for _ in range(20))
    assert torch.equal(first.flip(0), kernels.multiply("down_proj", slots[::-1], x))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("model"), dtype=torch.bfloat16))


@pytest.mark.parametrize("name", ["checkpoint", "int8", "int4-g32", "mxfp4"])
def test_the_engine_uses_them_and_agrees_with_itself(model: Path, name: str) -> None:
    spec = LoadSpec.checked(str(model), Settings({"budget": "50%"}), format=name, context=256, device="cuda")
    with unloading(Engine.load(spec)) as engine:
        assert cases.engine_error(engine) < 0.03


@pytest.mark.parametrize("host", ["all", "100kB"])
@pytest.mark.parametrize("name", ["checkpoint", "int4-g32"])
def test_packs_behind_a_gpu(model: Path, tmp_path: Path, name: str, host: str) -> None:
    """A pack in pinned memory, and one that is mostly on disk, answer alike: 24 experts of 7.7 kB in int4 are more than
    such memory holds."""
    pack = import_model(str(model), tmp_path / "pack", format=name)
    found = []
    for tier in ("all", host):
        settings = Settings({"budget": "50%", "eviction": "lru"})
        with unloading(
            Engine.load(LoadSpec.checked(str(pack), settings, context=256, device="cuda", host=tier))
        ) as engine:
            found.append(cases.logits(engine))
            steps = [p.step for p in engine.generate("hello", Sampling(max_new_tokens=16)) if p.step is not None]
            engine.expert_cache.check_integrity()
            held = engine.memory().host
        assert all(step.device_bytes <= step.budget_bytes for step in steps)
        read = sum(step.disk_bytes for step in steps)
        assert (read > 0) == (tier != "all"), f"{read} bytes came from the disk, and {held} were in host memory"
    off = (found[0] - found[1]).norm(dim=-1) / found[0].norm(dim=-1)
    assert torch.equal(found[0], found[1]), f"off by row: {off.tolist()}"


def milliseconds(call: Callable[[], object], rounds: int = 50) -> float:
    """Device time of a call, the mean over rounds that are queued one behind another."""
    for _ in range(3):
        call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(rounds):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / rounds


def copy_gbps() -> float:
    """Bytes read and written a second by a copy that is much larger than any cache."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(partial(target.copy_, source), 10) / 1e6


@pytest.mark.parametrize(("shape", "experts", "k"), [((2048, 768), 64, 8), ((4096, 14336), 4, 2)])
def test_how_fast_a_layer_is(shape: tuple[int, int], experts: int, k: int) -> None:
    """Prints milliseconds of one token's experts in a layer and their GB/s beside a copy's; asserts nothing on time."""
    (hidden, inner), of_a_copy = shape, copy_gbps()
    print(
        f"\n{torch.cuda.get_device_name()}: a copy reads and writes {of_a_copy:.0f} GB/s; "
        f"{k} of {experts} experts {hidden} x {inner}"
    )
    random = torch.Generator().manual_seed(0)
    parts = {
        "gate_up_proj": torch.randn(2 * inner, hidden, generator=random) * 0.02,
        "down_proj": torch.randn(hidden, inner, generator=random) * 0.02,
    }
    module = SimpleNamespace(has_gate=True, has_bias=False, _apply_gate=cases.gate)
    x = torch.randn(1, hidden, device=DEVICE, dtype=torch.bfloat16)
    for name, one in FORMATS.items():
        if not one.is_loadable:
            continue
        codec = cases.codec_of(name, parts, torch.bfloat16, DEVICE, False)
        slots = cases.copies_of(codec, parts, experts)  # what is read next is in no cache
        turns = itertools.cycle([slots[i : i + k] for i in range(0, experts, k)])
        fast, slow = ExpertMath(module, codec, cases.kernels_of(codec)), ExpertMath(module, codec)
        assert not objection(fast, slots[:k], hidden, torch.bfloat16)
        fast_ms = milliseconds(partial(next_token, fast, turns, x))
        slow_ms = milliseconds(partial(next_token, slow, turns, x), 10)
        gbps = k * codec.slot_bytes / fast_ms / 1e6
        print(
            f"{name:<14} {fast_ms:7.3f} ms  {gbps:6.0f} GB/s = {gbps / of_a_copy:4.0%} of a copy   "
            f"one by one {slow_ms:7.3f} ms"
        )


def next_token(math: ExpertMath, turns: Iterator[list[Slot]], x: torch.Tensor) -> torch.Tensor:
    return math.token.multiply(next(turns), x)


SHAPES = [(32, 4, 128, 128), (64, 8, 64, 64), (128, 128, 192, 128), (6, 2, 80, 80), (8, 1, 256, 256)]


def made_for(shape: tuple[int, int, int, int], dtype: torch.dtype) -> AttentionKernels:
    made = tried(Shape(*shape, dtype, shape[2] ** -0.5), DEVICE)
    if made is None and torch.cuda.get_device_capability() < (8, 0) and dtype == torch.bfloat16:
        pytest.skip("this GPU does not compute in bfloat16")
    assert made is not None, "the trial failed; run with --log-level=INFO for the reason"
    return made


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_close_to_the_formula(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    made, (heads, shared, width, values) = made_for(shape, dtype), shape
    for kept in (1, 15, 128, 129, 1000, 4100):
        q = torch.randn(1, heads, 1, width, device=DEVICE).to(dtype)
        k, v = (torch.randn(1, shared, kept, of, device=DEVICE).to(dtype) for of in (width, values))
        want = exact(q, k, v, width**-0.5)
        got = made(q, k, v, None)
        assert float((got[0, 0].float() - want).norm() / want.norm()) < max(1e-5, 4 * torch.finfo(dtype).eps), kept
        room = torch.full((1, shared, kept + 200, width), float("nan"), device=DEVICE, dtype=dtype)
        other = torch.full((1, shared, kept + 200, values), float("nan"), device=DEVICE, dtype=dtype)
        room[:, :, :kept], other[:, :, :kept] = k, v
        last = torch.tensor([kept - 1], device=DEVICE)
        assert torch.equal(made(q, room, other, last), got), kept


@torch.inference_mode()
def test_a_graph_is_replayed_at_another_length() -> None:
    made = made_for(SHAPES[0], torch.bfloat16)
    q = torch.randn(1, 32, 1, 128, device=DEVICE).to(torch.bfloat16)
    k, v = (torch.randn(1, 4, 1024, 128, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    last = torch.tensor([299], device=DEVICE)
    made(q, k, v, last)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        got = made(q, k, v, last)
    for count in (300, 1, 1024, 513):
        last.fill_(count - 1)
        graph.replay()
        assert torch.equal(got, made(q, k[:, :, :count], v[:, :, :count], None)), count
