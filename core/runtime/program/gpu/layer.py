"""What a decoder layer computes beside its products, on a GPU in the fast arithmetic: launches of the kernels of
rms.py, rotate.py, attend.py, gated_heads.py, route.py, activate.py, combine.py and cap.py. Everything runs on the
current stream, and nothing waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from core.memory.codec.fast.gpu.dense import NOTHING, End, Ready
from core.memory.codec.fast.gpu.launch import OPTIONS, PREPARED_BLOCKS
from core.memory.codec.kernels.products import ByTriton, Launcher, Starter
from core.runtime.program.attend import NO_WINDOW
from core.runtime.program.attend_block import BLOCK, Attend
from core.runtime.program.gate import Gate
from core.runtime.program.gated_heads import GatedHeads
from core.runtime.program.gpu.experts import WIDTH
from core.runtime.program.rms import Norm
from core.runtime.program.rotate import Rotate
from core.runtime.program.route import Route

WIDE, NARROW = 1024, 256  # numbers of a row that a program norms at once; of one that has multiplied before
PARTS = 64  # that blocks of keys are divided into, at most: programs of a head
QUERIES = 8  # that share what is read of a block of keys; half as many of keys in two parts, for their registers
SLICE = 32  # numbers of a head's values of a program
ROOM = 32 << 20  # bytes of scores at once, or of one row where those are more


Takers = tuple[Any, ...]  # core.memory.codec.fast.gpu.form.Form, one of each kind that takes a row in its own way


class Cached(NamedTuple):
    """Where keys and values are in a KV cache: addresses, and bytes from one head and one position to the next; and
    likewise the further part of keys that all heads share, where there is one."""

    k: int
    v: int
    k_head: int
    k_row: int
    v_head: int
    v_row: int
    more: int = 0
    more_row: int = 0


class LayerKernels:
    """What the layers of a model share. Raises ImportError."""

    def __init__(self, launcher: Launcher = ByTriton) -> None:
        from core.memory.codec.fast.gpu.form import NUMBERS, Ways
        from core.runtime.program.gpu import activate, attend, cap, combine, ends, gated_heads, rms, rotate, route

        self._numbers, self._attend, self._combine, self._activate = NUMBERS, attend, combine.combine, activate.activate
        self._rms, self._rotate, self._route = rms.rms, rotate.rotate, route.route
        self._cap, self._gated_heads = cap.cap, gated_heads.gated_heads
        self._ends, self._ways = ends, Ways
        self._counts: torch.Tensor | None = None
        self.launcher, self._starters = launcher, dict[object, Starter]()

    def norm(
        self,
        of: Norm,
        weight: torch.Tensor | None,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        out: torch.Tensor,
        scale: float = 1.0,
        factor: torch.Tensor | None = None,
        takers: Takers = (),
    ) -> Ready:
        """out = the norm of x [T, width] fp32, after x += scale * delta, times a factor [1] where there is one; `out`
        may be x. `takers`: forms that a row of it is prepared for -> what they take."""
        ways, into, ready = self._prepared(takers, x.device)
        start = self.start(self._rms, self._norming(of, scale, ways, WIDE), warps=4)
        start[len(x), 1](x, delta, weight, factor, out, x.stride(0), out.stride(0), into)
        return ready

    def then_norm(
        self, of: Norm, weight: torch.Tensor | None, x: torch.Tensor, out: torch.Tensor, scale: float, takers: Takers
    ) -> tuple[End, Ready]:
        """The same for a product of one row: x [1, width] += scale * the product, and its norm; what takers get."""
        ways, into, ready = self._prepared(takers, x.device)
        constants = self._norming(of, scale, ways, NARROW)
        return End(self._ends.joined_normed, (self._counter(x.device), x, weight, out, into), constants), ready

    def _norming(self, of: Norm, scale: float, ways: Any, wide: int) -> dict[str, Any]:
        block = min(wide, max(8, power_of_2(of.width)))
        return {"N": of, "SCALE": scale, "BLOCK": block, "BLOCKS": PREPARED_BLOCKS, "R": ways}

    def _prepared(self, takers: Takers, device: torch.device) -> tuple[Any, torch.Tensor | None, Ready]:
        """How a row is prepared, where, and what of that each taker takes."""
        if not takers:
            return None, None, NOTHING
        ways = self._ways(takers)
        into = torch.empty(1, ways.begins[-1], dtype=torch.int32, device=device)
        spans = zip(takers, ways.begins, ways.begins[1:], strict=False)
        return ways, into, {form.of_x: into[:, begin:end] for form, begin, end in spans}

    def _counter(self, device: torch.device) -> torch.Tensor:
        """Of the programs of a launch that are through; 0 between launches."""
        if self._counts is None:
            with torch.inference_mode(False):
                self._counts = torch.zeros(1, dtype=torch.int32, device=device)
        return self._counts

    def rotate(
        self,
        spec: Rotate,
        qkv: torch.Tensor,
        bias: torch.Tensor | None,
        weights: tuple[torch.Tensor | None, torch.Tensor | None],
        angles: tuple[torch.Tensor, torch.Tensor],
        positions: torch.Tensor,
        q: torch.Tensor,
        cached: Cached,
    ) -> None:
        """From the product qkv [T, n] to q [T, query_heads, width], and keys and values in the cache. `weights` of the
        norms of queries and keys; `angles`: cos and sin of all positions; `positions` [T] int64."""
        start = self.start(
            self._rotate, {"S": spec, "CACHE": self._numbers[spec.cache], "BLOCK": max(8, power_of_2(spec.width))}
        )
        programs = spec.query_heads + 2 * spec.heads, len(qkv)
        start[programs](qkv, bias, *weights, *angles, positions, q, *cached[:6])

    def attend(
        self,
        spec: Attend,
        q: torch.Tensor,
        cached: Cached,
        positions: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        most: int,
        window: int = 0,
    ) -> None:
        """out [T, query_heads, values] fp32 = attention of q [T, query_heads, width + more] fp32 to the positions up to
        each row's own, in `positions` [T] int64, or to the last `window` of them. `most`: positions that a row may
        read: it decides how much is launched, and no bit."""
        assert not spec.softcap
        span = -(-((min(most, window) if window else most) // BLOCK + 2) // 16) * 16  # one kind of number for kernels
        rows, at_once = len(q), max(1, ROOM // (spec.query_heads * span * BLOCK * 4))
        for first in range(0, rows, at_once):
            some = slice(first, first + at_once)
            self._attend_rows(spec, q[some], cached, positions[some], sinks, out[some], span, window or NO_WINDOW)

    def _attend_rows(
        self,
        spec: Attend,
        q: torch.Tensor,
        cached: Cached,
        positions: torch.Tensor,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
        span: int,
        window: int,
    ) -> None:
        rows, heads, parts = len(q), spec.query_heads, min(span, PARTS)
        slices = -(-spec.values // SLICE)
        sizes = [rows * heads * count for count in (span * BLOCK, span, slices * BLOCK)]
        scores, greatest, weights = torch.empty(sum(sizes), dtype=torch.float32, device=q.device).split(sizes)
        together = min(QUERIES // 2 if spec.more else QUERIES, power_of_2(spec.group))
        shares, kind = -(-spec.group // together), {"S": spec, "CACHE": self._numbers[spec.cache]}
        k, v, k_head, k_row, v_head, v_row, *more = cached
        scored = self.start(self._attend.score, {**kind, "TOGETHER": together}, warps=4)
        scored[parts, spec.heads * shares, rows](q, k, positions, scores, greatest, window, k_head, k_row, span, *more)
        added = self.start(self._attend.add_values, {**kind, "SLICE": SLICE})
        given = positions, sinks, scores, greatest, weights
        added[slices, heads, rows](v, *given, out, window, v_head, v_row, span)

    def gate(
        self, spec: GatedHeads, x: torch.Tensor, gates: torch.Tensor, columns: torch.Tensor, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, heads * width] fp32: x of this shape times the activation of its gates: those of head i are columns[i],
        int64, and those after it, of a row of `gates` [T, n]. `weight` of the norm of x, where there is one."""
        out = torch.empty_like(x)
        start = self.start(self._gated_heads, {"S": spec, "BLOCK": max(8, power_of_2(spec.width))})
        start[spec.heads, len(x)](x, gates, columns, weight, out, gates.stride(0))
        return out

    def cap(self, x: torch.Tensor, most: float) -> None:
        """Bound logits x, fp32, in place."""
        count = x.numel()
        self.start(self._cap, {"CAP": most, "BLOCK": WIDE}, warps=4)[-(-count // WIDE), 1](x, count)

    def route(
        self, rule: Route, logits: torch.Tensor, bias: torch.Tensor | None, scales: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From a router's logits [T, experts] fp32 to ids [T, chosen] int64 and weights [T, chosen] fp32. `scales`
        [experts] fp32 of the weights."""
        ids = torch.empty(len(logits), rule.chosen, dtype=torch.int64, device=logits.device)
        weights = torch.empty(len(logits), rule.chosen, dtype=torch.float32, device=logits.device)
        self.start(self._route, _sizes(rule))[len(logits), 1](logits, bias, scales, ids, weights)
        return ids, weights

    def then_route(
        self, rule: Route, bias: torch.Tensor | None, scales: torch.Tensor | None, device: torch.device
    ) -> tuple[End, torch.Tensor, torch.Tensor]:
        """The same for the router's product of one row; ids [1, chosen] and weights [1, chosen]."""
        ids = torch.empty(1, rule.chosen, dtype=torch.int64, device=device)
        weights = torch.empty(1, rule.chosen, dtype=torch.float32, device=device)
        given = self._counter(device), bias, scales, ids, weights
        return End(self._ends.joined_routed, given, _sizes(rule)), ids, weights

    def activate(self, spec: Gate, x: torch.Tensor) -> torch.Tensor:
        """[T, width] fp32 of rows of gates and ups [T, 2 * width]."""
        out = torch.empty(len(x), spec.width, dtype=torch.float32, device=x.device)
        start = self.start(self._activate, {"SPEC": spec, "BLOCK": WIDTH})
        start[-(-spec.width // WIDTH), len(x)](x, out)
        return out

    def combine(
        self,
        outputs: torch.Tensor,
        pairs: torch.Tensor,
        weights: torch.Tensor,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
        out: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """[T, width]: the sum of the rows pairs [T, chosen] int64 of `outputs` [n, width] fp32 by their weights, a pair
        of -1 left out, and `shared` [T, width], times the sigmoid of its gate [T] where there is one."""
        (count, chosen), width = pairs.shape, outputs.shape[1]
        found = torch.empty(count, width, dtype=out, device=outputs.device)
        start = self.start(self._combine, {"CHOSEN": chosen, "WIDTH": width, "BLOCK": WIDTH}, warps=4)
        start[-(-width // WIDTH), count](outputs, pairs, weights, shared, shared_gate, found)
        return found

    def start(self, kernel: object, constants: Mapping[str, Any], warps: int = 1) -> Starter:
        """A kernel of these constants, of which there is one for all layers."""
        key = kernel, *constants.values()
        found = self._starters.get(key)
        if found is None:
            found = self._starters[key] = self.launcher(kernel, {**constants, **OPTIONS, "num_warps": warps})
        return found


def _sizes(rule: Route) -> dict[str, Any]:
    """Constants of a router's kernel."""
    counts = {"EXPERTS": rule.experts, "CHOSEN": rule.chosen, "GROUPS": rule.groups.count if rule.groups else 1}
    return {"R": rule} | {name: max(8, power_of_2(count)) for name, count in counts.items()}


def power_of_2(count: int) -> int:
    """The least that is no less."""
    return 1 << (count - 1).bit_length()
