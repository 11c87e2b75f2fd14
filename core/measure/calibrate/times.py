"""Measures MoEpic's T_att, T_moe, T_head and T_load (section 3.4): medians of decode passes, experts resident.

A pass is cut at every router's call and at the end of every layer's experts. Between the two lies a MoE layer; from one
layer's experts to the next router, norms, attention and a shared expert; the rest is the head: embedding, layers
without experts, logits."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.cache.lease import Lease
from core.memory.store import Cancelled
from core.memory.ticket import Ticket
from core.runtime.measurement import LayerRun, MeasurementSession

PROMPT = 64  # tokens read before the timed ones
PASSES = 32  # most passes timed, after the first, which is warm-up
LONGEST_S = 10.0  # of timing passes; a slow model is timed over fewer, at least FEWEST
FEWEST = 3
FEWEST_TOKENS = 3  # a prompt, a pass that is warm-up, and one that counts
COPIES = 15

Gaps = list[float]


@dataclass(slots=True)
class PassTimer:
    """Time marks in a pass: on a GPU, events in its stream, so that the pass does not wait for them."""

    cuda: bool
    marks: list[Any] = field(default_factory=list)

    def mark(self, *_: object) -> None:
        """Adds a mark now. Ignores the arguments that a hook is called with."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def gaps(self) -> Gaps:
        """Milliseconds between marks; clears them."""
        marks, self.marks = self.marks, []
        if self.cuda:
            marks[-1].synchronize()
            return [float(a.elapsed_time(b)) for a, b in pairwise(marks)]
        return [(b - a) * 1e3 for a, b in pairwise(marks)]


def measure(
    bench: MeasurementSession, tokens: Sequence[int], cancel: threading.Event
) -> tuple[dict[str, float], dict[str, object]]:
    """Times in ms ("att" and "moe" of a layer, "head", "load" of an expert), and their basis. Raises Cancelled.

    `tokens`: at least FEWEST_TOKENS, of any text. Experts are fetched before each pass, and the pass counts only if
    that sufficed; where slots are too few for one pass, stalls are subtracted instead."""
    tokens = list(tokens[: min(PROMPT + PASSES + 1, bench.context)])
    start = min(PROMPT, len(tokens) // 2)
    routes = _routes(bench, tokens)
    cache = bench.kv.fresh()
    for at in range(0, start, bench.chunk):
        bench.run(tokens[at : min(at + bench.chunk, start)], cache)
    clock, resident, others = PassTimer(bench.device.type == "cuda"), list[Gaps](), list[Gaps]()
    began_s = time.perf_counter()
    with _hooked(bench, clock):
        for at in range(start, len(tokens)):
            if cancel.is_set():
                raise Cancelled
            with _resident(bench, routes[:, at]):
                clock.mark()
                bench.run([tokens[at]], cache, "decode")
                clock.mark()
            gaps = clock.gaps()
            stall_ms = bench.stall_ms()
            if at > start:
                (others if bench.missed() else resident).append(_without(gaps, stall_ms))
            if time.perf_counter() - began_s > LONGEST_S and at - start >= FEWEST:
                break
    bench.threads.use("prefill")
    gaps_of = np.array(resident or others)  # [passes, 2L + 1]
    return _summed(gaps_of) | {"load": (loaded := _copies(bench, cancel))[0]}, {
        "passes": len(gaps_of),
        "all_resident": bool(resident),
        "prompt_tokens": start,
        "load_from": loaded[1],
        "att_by_layer": np.median(gaps_of[:, 0:-1:2], axis=0).round(5).tolist(),
        "moe_by_layer": np.median(gaps_of[:, 1::2], axis=0).round(5).tolist(),
    }


def _summed(gaps: npt.NDArray[np.float64]) -> dict[str, float]:
    """[passes, 2L + 1] -> medians. The first gap is the embedding plus an attention block like the others."""
    moe, att = gaps[:, 1::2], gaps[:, 2:-1:2] if gaps.shape[1] > 3 else gaps[:, :1]
    att_ms = float(np.median(att))
    head = gaps[:, 0] - att_ms + gaps[:, -1]
    return {"att": att_ms, "moe": float(np.median(moe)), "head": max(0.0, float(np.median(head)))}


def _without(gaps: Gaps, stall_ms: float) -> Gaps:
    """Subtracts stalls from the gaps of the MoE layers, where they occur, in proportion."""
    layers = gaps[1::2]
    share = max(0.0, 1 - stall_ms / max(sum(layers), 1e-9))
    return [gap * share if i % 2 else gap for i, gap in enumerate(gaps)]


def _routes(bench: MeasurementSession, tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    """[L, T, k] the routers' choices for a text."""
    found: list[list[npt.NDArray[np.int64]]] = [[] for _ in bench.sites]

    def note(run: LayerRun) -> None:
        found[run.seen.layer].append(run.ids.cpu().numpy())

    cache = bench.kv.fresh()
    with bench.watched(note, lambda embedded: None):
        for at in range(0, len(tokens), bench.chunk):
            bench.run(tokens[at : at + bench.chunk], cache)
    return np.stack([np.concatenate(rows) for rows in found])


@contextmanager
def _hooked(bench: MeasurementSession, clock: PassTimer) -> Iterator[None]:
    with ExitStack() as hooks:
        for site in bench.sites:
            hooks.callback(site.router.register_forward_pre_hook(clock.mark, prepend=True).remove)
            hooks.callback(site.module.register_forward_hook(clock.mark).remove)
        yield


def _resident(bench: MeasurementSession, experts: npt.NDArray[np.int64]) -> AbstractContextManager[None]:
    """Inside, one token's experts [L, k] are resident, if the slots suffice for all of them. They leave for others that
    the router chooses after all: computed alone, a token can be routed otherwise than in a longer pass."""
    if not bench.has_room(experts.shape[1]):
        return nullcontext()
    eids = experts + np.arange(bench.shape.layers)[:, None] * bench.shape.experts
    return bench.expert_cache.pinning(eids.ravel().tolist())


def _release(bench: MeasurementSession, lease: Lease) -> None:
    bench.expert_cache.release(lease, bench.transfers.fence())


def _copies(bench: MeasurementSession, cancel: threading.Event) -> tuple[float, str]:
    """Median milliseconds of copying one expert, one at a time, into the slots that already hold it; and the source
    (memory, or disk for most of them)."""
    spans: list[float] = []
    from_disk = 0
    eids = [eid for eid in range(bench.shape.total) if bench.expert_cache.is_resident(eid)]
    eids = eids[:: max(1, len(eids) // COPIES)][:COPIES] or [0]
    for eid in eids:
        if cancel.is_set():
            raise Cancelled
        layer, expert = divmod(eid, bench.shape.experts)
        lease = bench.expert_cache.acquire(layer, [expert])
        try:
            (leased,) = lease.requests
            if leased.ticket is not None:
                bench.transfers.wait(leased.ticket)
            cache = bench.expert_cache
            ticket = Ticket(cache.copies.whole[eid], cache.core.table[eid], cache.store.bytes_of(eid), True, "decode")
            bench.transfers.take_finished()
            bench.transfers.wait(bench.transfers.submit(ticket))
            bench.transfers.settle(ticket)
            if ticket.event is not None:
                ticket.event.synchronize()
            bench.transfers.take_finished()  # on a GPU, the landing time is known now
        finally:
            _release(bench, lease)
        spans.append((ticket.landed_s - ticket.started_s) * 1e3)
        from_disk += ticket.disk_bytes > 0
    return median(spans), "disk" if from_disk > len(spans) / 2 else "memory"
