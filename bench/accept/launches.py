"""Check of `launch.py accept`: kernels launched by Triton, and through the CUDA driver, as where Triton finds no C
compiler. The bits of all formats, and the host's time for a launch."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.accept.drawn import Subject
from bench.accept.link import Wrong, codec_of
from core.memory.codec import FORMATS, Codec, PartSpec, kernels, make_codec
from core.memory.codec.base import Base
from core.memory.codec.kernels import Launcher, SlotKernels
from core.memory.codec.measure import random_expert

SHAPE = (203, 640)  # no block divides the rows; every format's groups divide the inputs
SLOTS = 9  # more than one launch takes of the shorter kind
TOP_K = 8
ROUNDS = 5  # in which the ways take turns


def launches(subject: Subject) -> dict[str, Any]:
    """The same bits both ways, also as a graph, and microseconds of the host for a product."""
    if reason := kernels.why_not(subject.device):
        return {"left_out": reason}
    if torch.version.hip is not None:
        return {"left_out": "on AMD only Triton launches kernels"}
    ways: dict[str, Launcher] = {"driver": kernels.driver_launcher(subject.device)}
    if lacks := kernels.lacking():
        return {"left_out": f"Triton's own launcher needs {lacks}", **host_us(ways, subject)}
    ways["triton"] = kernels.ByTriton
    found = {"formats": same_bits(ways, subject.device), **host_us(ways, subject)}
    graph_has_the_bits(ways["driver"], subject)
    return found | {"verdict": f"a product costs the host {found['triton_us'] - found['driver_us']:.0f} us less"}


def same_bits(ways: Mapping[str, Launcher], device: torch.device) -> int:
    """In every format, products by addresses and by ids, and dequantised matrices -> formats. Raises Wrong."""
    for name in FORMATS:
        specs = {"down_proj": PartSpec(SHAPE, torch.bfloat16)}
        codec = make_codec(name, specs=specs, dtype=torch.bfloat16, device=device)
        slots = filled(codec, [{"down_proj": torch.randn(SHAPE) * 0.1} for _ in range(SLOTS)])
        x = torch.randn(SLOTS, SHAPE[1], device=device).to(torch.bfloat16)
        first, *others = (_everything(kernels_of(codec, launcher), slots, x) for launcher in ways.values())
        for what, result in first.items():
            if any(not torch.equal(result, other[what]) for other in others):
                raise Wrong(f"{name}, {what}: other bits through the driver than by Triton")
    return len(FORMATS)


def kernels_of(codec: Codec, launcher: Launcher) -> SlotKernels:
    """Those of a codec, launched in one of the ways."""
    assert isinstance(codec, Base)
    return SlotKernels(codec, launcher)


def filled(codec: Codec, experts: list[dict[str, torch.Tensor]]) -> list[torch.Tensor]:
    """A slot for each expert."""
    slots = [torch.empty(codec.slot_bytes, dtype=torch.uint8, device=codec.device) for _ in experts]
    for slot, parts in zip(slots, experts, strict=True):
        codec.place(codec.encode(parts), slot)
    return slots


def _everything(one: SlotKernels, slots: list[torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    table = torch.tensor([slot.data_ptr() for slot in slots], device=x.device)
    ids = torch.arange(len(slots), device=x.device).flip(0)
    found = {
        "a state each": one.multiply("down_proj", slots, x),
        "one state": one.multiply("down_proj", slots[:TOP_K], x[:1]),
        "by ids": one.multiply_by_ids("down_proj", table, ids, x),
    }
    if not one.is_plain:
        found["dequantised"] = torch.cat([some.clone() for _, some in one.dequantized("down_proj", slots)])
    return found


def host_us(ways: Mapping[str, Launcher], subject: Subject) -> dict[str, float]:
    """Of a decoded token's product with an expert's first matrix, the host's part: the median of rounds in which the
    ways take turns. Most of it is not the launch: the same Python makes the result's tensor and groups the slots."""
    codec = codec_of(subject)
    slots = filled(codec, [random_expert(subject.sizes.hidden, subject.sizes.width)]) * TOP_K
    x = torch.randn(1, subject.sizes.hidden, device=subject.device).to(torch.bfloat16)
    each = {way: kernels_of(codec, launcher) for way, launcher in ways.items()}
    spans: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 if subject.small else ROUNDS):
        for way, one in each.items():
            spans[way].append(_us(lambda one=one: one.multiply("gate_up_proj", slots, x), 20 if subject.small else 500))  # type: ignore[misc]
    return {f"{way}_us": statistics.median(some) for way, some in spans.items()}


def _us(call: Callable[[], object], rounds: int) -> float:
    """Of this thread, which launches and does not wait; the first call compiles."""
    call()
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(rounds):
        call()
    spent_s = time.perf_counter() - began_s
    torch.cuda.synchronize()
    return 1e6 * spent_s / rounds


def graph_has_the_bits(launcher: Launcher, subject: Subject) -> None:
    """A captured product, replayed with another state. Raises Wrong."""
    codec = codec_of(subject)
    slots = filled(codec, [random_expert(subject.sizes.hidden, subject.sizes.width) for _ in range(2)])
    one, x = kernels_of(codec, launcher), torch.randn(1, subject.sizes.hidden, device=subject.device)
    x = x.to(torch.bfloat16)
    one.multiply("gate_up_proj", slots, x)  # compiled and loaded before
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = one.multiply("gate_up_proj", slots, x)
    x.copy_(torch.randn_like(x))
    graph.replay()
    if not torch.equal(captured, one.multiply("gate_up_proj", slots, x)):
        raise Wrong("a graph of launches through the driver has other bits than these")
