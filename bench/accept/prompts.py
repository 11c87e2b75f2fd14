"""Checks of `launch.py accept` on passes of many tokens: the same bits whichever experts are resident, and what decides
between the products of few and of many rows."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from bench.accept.drawn import QWEN, Subject
from bench.accept.engines import drawn, load
from bench.accept.launches import filled, kernels_of
from bench.accept.link import Wrong, milliseconds
from bench.accept.parts import in_a_graph_us
from bench.models.generate import checkpoint
from core.engine import Engine
from core.hf.cached_pass import cached_pass
from core.memory.codec import PartSpec, kernels, make_codec
from core.memory.codec.measure import random_expert
from core.runtime.grouped import FEW, products

LENGTHS = (20, 65, 100, 200, 400)
FORMATS = ("int4-g64", "int8", "checkpoint")
BUDGETS = ("50%", "20%")
EXPERTS, MANY = 8, 128  # multiplied together where products are timed; so many that no cache holds them
ROWS = (1, 2, 4, 8, 16, 32, 64)


def prompts(subject: Subject) -> dict[str, Any]:
    """Prompts of several lengths with all experts resident and with few: the same bits, and milliseconds."""
    model, found = str(checkpoint(subject.folder, subject.different)), subject.report()
    lengths = LENGTHS[:3] if subject.small else LENGTHS
    for name in FORMATS[:1] if subject.small else FORMATS:
        want: list[torch.Tensor] = []
        for budget in ("all", *BUDGETS):
            engine = load(model, subject.device, 1024, {"budget": budget, "predictor": "none"}, format=name)
            try:
                passes = [_pass(engine, length) for length in lengths]
                found[f"{name}_{budget}_ms"] = [round(1e3 * seconds, 2) for _, seconds in passes]
            finally:
                engine.unload()
            got = [logits for logits, _ in passes]
            want = want or got
            for length, one, other in zip(lengths, want, got, strict=True):
                if not torch.equal(one, other):
                    off = float((one - other).norm() / one.norm())
                    raise Wrong(f"{name}: a prompt of {length} tokens has other bits with {budget}, {off:.2%} off")
    return found | {"lengths": list(lengths)}


@torch.inference_mode()
def _pass(engine: Engine, length: int) -> tuple[torch.Tensor, float]:
    """Logits [length, V] of a prompt, fp32, and the seconds of its second reading."""
    vocab = int(engine.model.config.vocab_size)
    ids = torch.tensor([drawn(length, vocab, length)], device=engine.model.device)
    for _ in range(2):
        began_s = time.perf_counter()
        logits = cached_pass(engine.model, ids, engine.fresh_cache()).logits[0].float().cpu()
        seconds = time.perf_counter() - began_s
    return logits, seconds


def rows(subject: Subject) -> dict[str, Any]:
    """GB/s at which a token's products read slots. Microseconds of EXPERTS experts' first matrices by rows each: read
    from the slots by row (the device's alone), or dequantised once (the host's launches included). Whether torch's
    grouped product gives a row the same bits whatever lies beside it."""
    if reason := kernels.why_not(subject.device):
        return {"left_out": reason}
    sizes = subject.sizes if subject.small else QWEN
    part, found = "gate_up_proj", subject.report()
    for name in FORMATS[:2]:
        specs = {part: PartSpec((2 * sizes.width, sizes.hidden), torch.bfloat16)}
        codec = make_codec(name, specs=specs, dtype=torch.bfloat16, device=subject.device)
        expert = {part: random_expert(sizes.hidden, sizes.width)[part]}
        slots, one = filled(codec, [expert] * MANY), kernels_of(codec, kernels.launcher_of(subject.device))
        found[f"{name}_gbps"] = MANY * codec.slot_bytes / in_a_graph_us(partial(_tokens, one, part, slots), 1) / 1e3
        slots = slots[:EXPERTS]
        table = torch.tensor([slot.data_ptr() for slot in slots], device=subject.device)
        for count in ROWS:
            x = torch.randn(EXPERTS * count, sizes.hidden, device=subject.device).to(torch.bfloat16)
            ids = torch.arange(EXPERTS, device=subject.device).repeat_interleave(count)
            found[f"{name}_{count}_rows_us"] = {
                "by_row": in_a_graph_us(partial(one.multiply_by_ids, part, table, ids, x)),
                "dequantised": 1e3 * milliseconds(partial(_dequantised, one, part, slots, count, x), 20),
            }
    return found | {"limit": FEW} | _beside_others(subject)


def _tokens(one: Any, part: str, slots: Sequence[torch.Tensor]) -> None:
    """Products of one state with EXPERTS experts at a time: what is read is in no cache."""
    x = torch.zeros(1, one.inputs(part), dtype=one.dtype, device=slots[0].device)
    for at in range(0, len(slots), EXPERTS):
        one.multiply(part, slots[at : at + EXPERTS], x)


def _dequantised(one: Any, part: str, slots: Sequence[torch.Tensor], count: int, x: torch.Tensor) -> None:
    out = x.new_empty(len(x), one.outputs(part))
    for first, weights in one.dequantized(part, slots):
        some = slice(first * count, (first + len(weights)) * count)
        products(x[some], weights, [count] * len(weights), out[some])


def _beside_others(subject: Subject) -> dict[str, Any]:
    """Rows of one expert alone and beside others', through the grouped product: how many numbers differ. As `mm`, too:
    an expert by itself against the grouped one."""
    weights = torch.randn(4, 1536, 2048, device=subject.device, dtype=torch.bfloat16) * 0.02
    found, odd = {}, list[str]()
    for count in (9, 16, 33, 64, 130, 300):
        x = torch.randn(count, 2048, device=subject.device, dtype=torch.bfloat16)
        alone = x.new_empty(count, 1536)
        products(x, weights[:1], [count], alone)
        for other in (1, 16, 100, 500):
            many = torch.cat([x, torch.randn(3 * other, 2048, device=x.device, dtype=x.dtype)])
            out = x.new_empty(len(many), 1536)
            products(many, weights, [count, other, other, other], out)
            if not torch.equal(out[:count], alone):
                odd.append(f"{count} beside {other}: {int((out[:count] != alone).sum())}")
        found[f"mm_{count}_differs"] = int((torch.mm(x, weights[0].t()) != alone).sum())
    return {"beside_others": odd or "the same bits", **found}


def graph_nodes(subject: Subject, nodes: int = 1000) -> dict[str, Any]:
    """Microseconds a launch of a trivial kernel: by the host, and as a node of a graph."""
    x = torch.zeros(256, device=subject.device)
    nodes = 20 if subject.small else nodes

    def launch() -> None:
        for _ in range(nodes):
            x.add_(1)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        launch()
    found: dict[str, Any] = {"nodes": nodes}
    for name, call in (("launched", launch), ("graph", graph.replay)):
        spans = [_span(call) for _ in range(5)]
        found[f"{name}_us"] = 1e6 * statistics.median(spans) / nodes
    return found


def _span(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began_s
