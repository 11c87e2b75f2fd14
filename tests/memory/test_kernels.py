"""The grouped kernels: compilable for GPUs, unused where they cannot run. Their results: test_interpreted.py."""

import logging
from pathlib import Path

import pytest
import torch

from core.cache.lease import LeasedSegment
from core.memory.codec import FORMATS, PartSpec, make_codec
from core.memory.codec.kernels import available, blocks, make_kernels, say_unavailable, scratch_bytes, why_not
from core.memory.codec.kernels.products import INPUTS, LANES, LANES_MOST, SCRATCH_BYTES, launches
from core.runtime.product import LATE, TOGETHER, limited
from core.types import Outcome, Segment
from tests.kernel_cases import codec_of, matrices
from tests.logged import Logged

CPU = torch.device("cpu")


@pytest.mark.long(0.1)  # by default they are interpreted (test_interpreted.py), and the fast ones are compiled as well
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest, and capability 8.9: python -m core.memory.codec.kernels.check."""
    pytest.importorskip("triton", reason="the package triton is not installed")
    from triton.runtime.driver import driver

    from core.memory.codec.kernels.check import variants

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    touched = property(lambda self: pytest.fail("this needs the C compiler of Triton's driver"))
    monkeypatch.setattr(type(driver), "active", touched)
    formats = ["checkpoint", "int4-g64", "int8"] if capability == 80 else ["mxfp4"]
    built = dict(variants(formats, (96, 256), torch.bfloat16, capability))
    assert len(built) == (10 if capability == 80 else 3)
    for name, compiled in built.items():
        assert len(compiled.asm["cubin"]) > 0
        assert ".v4.b32" in compiled.asm["ptx"], f"{name} does not read 16 bytes at a time"


def test_they_are_not_used_where_they_cannot_run(monkeypatch: pytest.MonkeyPatch, caplog: Logged) -> None:
    codec = codec_of("int4-g32", matrices(1, 8, 64, False, False)[0], torch.float32, CPU, False)
    cuda = torch.device("cuda")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert make_kernels(codec) is None  # a CPU: nothing is missing, nothing is said
    assert not available(CPU)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "not installed" in why_not(cuda)
    monkeypatch.setattr(codec, "device", cuda)
    say_unavailable.cache_clear()
    with caplog.at_level(logging.WARNING, "moestro.kernels"):
        assert make_kernels(codec) is None
        assert make_kernels(codec) is None
    assert len(caplog.records) == 1
    assert "triton is not installed" in caplog.text
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # it would look for slots in the CPU's memory
    assert "TRITON_INTERPRET" in why_not(cuda)
    assert not available(torch.device("meta"))


@pytest.mark.parametrize("count", [1, LANES, LANES + 1, LANES_MOST, 64])
def test_launches_cover_every_slot_once_in_two_sizes(count: int) -> None:
    slots = [64 * (i + 1) for i in range(count)]
    seen = list[int]()
    for first, some, bases in launches(slots):
        assert len(bases) == (LANES if count <= LANES else LANES_MOST)
        assert first == len(seen)
        seen += bases[:some]
    assert seen == slots


@pytest.mark.parametrize("shape", [(1536, 2048), (2048, 768), (5760, 2880), (28672, 4096), (96, 64)])
def test_blocks_fit_the_shape(shape: tuple[int, int]) -> None:
    """Powers of two, as Triton wants them, that read at most a third of a row for nothing."""
    _, inputs = shape
    for bits, per in INPUTS.items():
        for block in (blocks.coded(bits, inputs // per), blocks.dequantize(inputs // per)):
            assert block.outputs & (block.outputs - 1) == block.across & (block.across - 1) == 0
        words = inputs // per
        across = blocks.coded(bits, words).across
        assert -(-words // across) * across <= 4 / 3 * words
    for size in (2, 4):
        assert blocks.plain(size, inputs).across * size <= blocks.PLAIN_BYTES


@pytest.mark.parametrize("shape", [(512, 256), (1536, 2048), (28672, 4096)])
def test_scratch_is_bounded(shape: tuple[int, int]) -> None:
    """What a budget has to count: 64 MB, or one matrix where that is larger; nothing for plain weights."""
    outputs, inputs = shape
    specs = {
        "gate_up_proj": PartSpec(shape, torch.bfloat16),
        "down_proj": PartSpec((inputs, outputs // 2), torch.bfloat16),
    }
    largest = 2 * outputs * inputs
    for name, one in FORMATS.items():
        codec = make_codec(name, specs=specs, dtype=torch.bfloat16, device=torch.device("meta"))
        want = 0 if one.is_plain else min(max(SCRATCH_BYTES, largest), LANES_MOST * largest)
        assert scratch_bytes(codec) == want <= max(SCRATCH_BYTES, largest)


def test_experts_of_a_prompt_are_cut_into_portions() -> None:
    """Resident ones first, each once, no more rows than tokens unless one expert has them, few late ones at a time."""
    counts = [7, 1, 1, 30, 2, 2, 2, 2, 2, 1, *[0] * 20, 3]
    ticket = object()
    held = [
        LeasedSegment(
            e,
            Segment(e, range(1)),
            [],
            Outcome.HIT,
            ticket if e in (4, 5, 6, 7, 8) else None,  # type: ignore[arg-type]
        )
        for e in range(len(counts))
    ]
    portions = list(limited(held, dict(enumerate(counts)), 30))
    assert [one for some in portions for one in some] == sorted(held, key=lambda one: one.ticket is not None)
    for some in portions:
        assert sum(counts[one.expert] for one in some) <= 30
        assert len(some) <= (TOGETHER if some[-1].ticket is None else LATE)
    assert [one.expert for one in portions[0]] == [0, 1, 2]
    assert TOGETHER >= LATE


def test_experts_of_few_rows_are_computed_apart_from_those_of_many() -> None:
    counts = [7, 1, 1, 9, 2, 8, 12, 2]
    held = [
        LeasedSegment(e, Segment(e, range(1)), [], Outcome.HIT, object() if e % 2 else None)  # type: ignore[arg-type]
        for e in range(len(counts))
    ]
    portions = list(limited(held, dict(enumerate(counts)), 100, few=8))
    assert sorted(one.expert for some in portions for one in some) == list(range(len(counts)))
    for some in portions:
        assert len({counts[one.expert] > 8 for one in some}) == 1
    late = [one.ticket is not None for some in portions for one in some]
    assert late == sorted(late), "resident experts first"
