"""Grouped-query attention with rotary embeddings: found by trying a layer's module on random states."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from core.errors import ModelError
from core.hf.reserved_layers import Part, Reserved
from core.hf.reserved_window import ReservedWindow
from core.memory.codec.fast.steps import Work, named, single, some
from core.runtime.program import attend, head_gates, rms, rotate
from core.runtime.program.attend_block import Attend
from core.runtime.program.head_gates import Gates
from core.runtime.program.mixer import Pass, norm, row_at
from core.runtime.program.rms import Norm
from core.runtime.program.rotate import Rotate
from core.runtime.program.trial import Angles, Trial, trial
from core.runtime.program.weights import NormWeight, Weight, known, near, norm_of, weight_of

NORMS = ("q_norm", "k_norm"), ("query_layernorm", "key_layernorm")
STEPS = "head", "row"
BOUNDS = "softcap", "attn_logit_softcapping", "clip_qkv"  # random states do not reach them


@dataclass(frozen=True, slots=True)
class Attention:
    """Of heads of `width` numbers, of which the first `rotated` are turned. A norm of queries and keys is of each head,
    before it is turned or after it, or of all heads at once, before. `window`: a token reads the keys of the last so
    many, with its own; 0 = of all. `ring`: positions that there is memory for, where these are fewer than the
    context's; else 0. Heads of values have `values` numbers, which are multiplied by `value_scale`."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    query_heads: int
    heads: int
    width: int
    values: int
    rotated: int
    scale: float
    value_scale: float
    q_norm: NormWeight | None
    k_norm: NormWeight | None
    bias: torch.Tensor | None  # of queries, keys and values, one after the other
    sinks: torch.Tensor | None  # [query_heads] fp32
    angles: Angles
    cache: torch.dtype  # of keys and values in the KV cache
    window: int
    ring: int
    value_norm: Norm | None = None  # without weights
    interleaved: bool = False
    norm_last: bool = False
    gates: Gates | None = None

    @property
    def outputs(self) -> int:
        """Numbers of the product of queries, keys and values."""
        return self.q.outputs + self.k.outputs + self.v.outputs

    @property
    def own_gates(self) -> tuple[Weight, ...]:
        """The product of gates, where they have one."""
        return () if self.gates is None or self.gates.weight is None else (self.gates.weight,)

    @property
    def across(self) -> tuple[NormWeight, NormWeight] | None:
        """The norms of all heads of queries and of keys."""
        if self.q_norm is None or self.k_norm is None or self._of_heads:
            return None
        return self.q_norm, self.k_norm

    @property
    def _of_heads(self) -> bool:
        return self.q_norm is not None and self.q_norm.form.width == self.width

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part((self.heads, self.width), self.cache), Part((self.heads, self.values), self.cache)

    @property
    def weights(self) -> Iterator[Weight]:
        return iter((self.q, self.k, self.v, *self.own_gates, self.o))

    def steps_of(self, texts: Sequence[int]) -> int:
        return 7 + 2 * sum([len(self.written(rows)) for rows in texts])

    def written(self, rows: int) -> range:
        """The first of the rows that are written together, and then read: as many as leave what they read."""
        return range(0, rows, self.ring - self.window + 1 if self.ring else rows)

    def add(self, to: Pass, number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        qkv, q = to.scratch("qkv", self.outputs), to.scratch("queries", self.query_heads * self.width)
        mixed = to.scratch("mixed", self.query_heads * self.values)
        starts = 0, self.q.outputs, self.q.outputs + self.k.outputs
        own = [to.scratch("gates", one.outputs) for one in self.own_gates]
        to.product((self.q, self.k, self.v, *self.own_gates), x, [*(qkv[:, first:] for first in starts), *own])
        first = 0
        for across in self.across or ():
            part = qkv[:, first : first + across.form.width]
            to.steps.add(norm(across, part, None, part))
            first += across.form.width
        turned, attending = self.kernels()
        for_turning, for_attending = self.addresses()
        cos, sin = (to.angles(table) for table in (self.angles.cos, self.angles.sin))
        begin = 0
        for text in to.texts:
            held, parts = text.held[number], self.written(text.rows)
            cached = dict(zip("kv", held.addresses, strict=True)) | self.strides(held.positions)
            for first in parts:
                rows, row = min(parts.step, text.rows - first), begin + first
                units = rows * self.heads
                at = cached | {"q": row_at(q, row), "positions": to.positions + 8 * row}
                angles = {"cos": row_at(cos, row), "sin": row_at(sin, row)}
                given = named(rotate.FIELDS, qkv=row_at(qkv, row), **for_turning, **angles, **at)
                to.steps.add(Work(rotate.kernel(turned), given, units, some(units, 16)))
                at |= for_attending | {"rows": rows, "window": self.window or attend.NO_WINDOW}
                given = named(attend.FIELDS, out=row_at(mixed, row), **at)
                to.steps.add(Work(attend.kernel(attending), given, units, 1))
            begin += text.rows
        if self.gates is not None:
            to.steps.add(self.gates.work(mixed, *(own or [qkv])))
        to.product((self.o,), mixed, (out,))

    def strides(self, positions: int) -> dict[str, int]:
        """Bytes from one head to the next, and from one position to the next, in memory for so many positions."""
        sizes = {"k": self.width * self.cache.itemsize, "v": self.values * self.cache.itemsize}
        return {
            f"{one}_{by}_stride": size * n
            for one, size in sizes.items()
            for by, n in zip(STEPS, (positions, 1), strict=True)
        }

    def kernels(self) -> tuple[Rotate, Attend]:
        """The kernels before and after keys and values are in the cache."""
        cache = self.cache
        bias = self.bias.dtype if self.bias is not None else None
        norm = self.q_norm.form if self.q_norm is not None and self._of_heads else None
        heads, gated = (self.query_heads, self.heads, self.width), self.gates is not None and not self.own_gates
        last, own = (self.interleaved, self.norm_last), self.values if self.values != self.width else 0
        also = self.value_norm, self.ring
        turned = Rotate(*heads, self.rotated, cache, norm, bias, *last, *also, gated, own, self.value_scale)
        return turned, Attend(*heads, self.values, cache, self.scale, sinks=self.sinks is not None, ring=self.ring)

    def addresses(self) -> tuple[dict[str, int], dict[str, int]]:
        """What the kernels read that is not of a pass."""
        turned = {} if self.bias is None else {"bias": self.bias.data_ptr()}
        if self.q_norm is not None and self.k_norm is not None and self._of_heads:
            turned |= {"q_weight": self.q_norm.at, "k_weight": self.k_norm.at}
        return turned, {} if self.sinks is None else {"sinks": self.sinks.data_ptr()}


def attention_of(module: Any, angles: Angles, kept: Reserved, dtype: torch.dtype, window: int = 0) -> Attention:
    """The attention of a layer, for states of a type. `kept`: what the KV cache has of the layer. `window`: what it
    reads of memory for more positions."""
    norms = next((names for names in NORMS if isinstance(getattr(module, names[0], None), nn.Module)), ())
    value_norm = getattr(module, "v_norm", None)
    sinks = getattr(module, "sinks", None)
    gate = next((name for name in head_gates.NAMES if hasattr(module, name)), "")
    own = [name for name in ("sinks", gate) if getattr(module, name, None) is not None]
    known(module, ("q_proj", "k_proj", "v_proj", "o_proj", *norms, *own))
    width = module.head_dim
    window = kept.sliding_window if isinstance(kept, ReservedWindow) else window
    ring = room if (room := kept.window) is not None and room < len(angles.cos) else 0
    if bounded := [name for name in BOUNDS if getattr(module, name, None) or getattr(module.config, name, None)]:
        raise ModelError(f"attention with bounds on its numbers ({', '.join(bounded)}) is not known")
    q, k, o = (weight_of(getattr(module, name)) for name in ("q_proj", "k_proj", "o_proj"))
    v = k if module.v_proj is None else weight_of(module.v_proj)  # the same before norms and rotation
    rotated, heads = 2 * angles.cos.shape[1], k.outputs // width
    if rotated > width or q.outputs % width or k.outputs % width or v.outputs % heads:
        raise ModelError("heads of this form are not known")
    values = v.outputs // heads
    gated = values == width and q.outputs == 2 * o.inputs
    q_norm, k_norm = _norms([norm_of(getattr(module, name)) for name in norms], width, (q.outputs, k.outputs))
    form = Attention(
        q,
        k,
        v,
        o,
        o.inputs // values,
        heads,
        width,
        values,
        rotated,
        float(module.scaling),
        float(getattr(module, "v_scale", 1.0)),
        q_norm,
        k_norm,
        None,
        sinks.detach().float() if sinks is not None else None,
        angles,
        dtype,
        window,
        ring,
        None if value_norm is None else norm_of(value_norm, width).form,
        gates=Gates.of(o.inputs // width, width) if gated else None,
    )
    if form.query_heads * width * (1 + gated) != q.outputs or (value_norm is not None and values != width):
        raise ModelError("heads of this form are not known")
    if gate:
        form = replace(form, gates=Gates.of(form.query_heads, values, weight_of(getattr(module, gate))))
    form = _tried(form, module, getattr(module, gate, None))
    if form.across is None and form.gates is None and q.bias is not None and k.bias is not None and v.bias is not None:
        bias = torch.cat([q.bias, k.bias, v.bias])  # added by the first kernel
        q, k, v = (replace(one, bias=None) for one in (q, k, v))
        form = replace(form, q=q, k=k, v=v, bias=bias)
    return form


def _norms(
    norms: Sequence[NormWeight], width: int, outputs: tuple[int, int]
) -> tuple[NormWeight, NormWeight] | tuple[None, None]:
    """Those of queries and of keys, if any: of each head, or of all heads, whose products have so many `outputs`."""
    if not norms:
        return None, None
    of_q, of_k = norms
    widths = of_q.form.width, of_k.form.width
    if widths not in ((width, width), outputs):
        raise ModelError("norms of some of the heads are not known")
    if widths[0] == width and of_q.form != of_k.form:
        raise ModelError("norms of queries and keys of different kinds are not known")
    return of_q, of_k


@torch.inference_mode()
def _tried(form: Attention, module: Any, gate: Any) -> Attention:
    """The form with the order of what is turned and normed that is nearest to the module's keys; raises ModelError
    where keys, values or results differ by more than rounding."""
    seen = trial(module, form.angles, form.cache, form.q.inputs, form.window)
    rows, products = len(seen.x), (module.q_proj, module.k_proj, module.v_proj or module.k_proj)
    qkv = torch.cat([product(seen.x).float() for product in products], -1).contiguous()
    first = 0
    for across in form.across or ():
        single(rms.kernel(rms.Rms(across.form)), _in_place(across, qkv[:, first:]), rows)
        first += across.form.width
    best, nearest = form, float("inf")
    last_too = (False, True) if form.kernels()[0].norm else (False,)
    for rotated, interleaved, last in itertools.product((form.rotated, 0), (False, True), last_too):
        tried = replace(form, rotated=rotated, interleaved=interleaved, norm_last=last)
        off = (_keys(tried, qkv, seen)[1].float() - seen.keys.float()).norm()
        if off < nearest:
            best, nearest = tried, float(off)
    q, keys, values = _keys(best, qkv, seen)
    out = torch.empty(rows, form.query_heads * form.values)
    at = {"q": q, "k": keys, "v": values, "out": out, "positions": seen.positions}
    sizes = form.strides(rows) | {"rows": rows, "window": form.window or attend.NO_WINDOW}
    given = named(attend.FIELDS, **at, **sizes, **form.addresses()[1])
    single(attend.kernel(best.kernels()[1]), given, rows * form.heads)
    if near(keys, seen.keys) and near(values, seen.values):
        for gates in (None,) if form.gates is None else form.gates.kinds():
            mixed = out.clone()
            if gates is not None:
                gated = qkv if gates.weight is None else gate(seen.x).float()
                gating = gates.work(mixed, gated)
                single(gating.kernel, gating.arguments, gating.units)
            if near(module.o_proj(mixed.to(form.cache)), seen.output):
                return replace(best, gates=gates)
    raise ModelError(f"{type(module).__name__} computes in a way that is not known")


def _keys(form: Attention, qkv: torch.Tensor, seen: Trial) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [T, query_heads * width], keys [heads, T, width] and values [heads, T, values] after the first kernel."""
    rows = len(qkv)
    q = torch.empty(rows, form.query_heads * form.width)
    keys, values = (torch.empty(form.heads, rows, width, dtype=form.cache) for width in (form.width, form.values))
    at = {"qkv": qkv, "cos": seen.cos, "sin": seen.sin, "positions": seen.positions, "q": q, "k": keys, "v": values}
    given = named(rotate.FIELDS, **at, **form.strides(rows), **form.addresses()[0])
    single(rotate.kernel(form.kernels()[0]), given, rows * form.heads)
    return q, keys, values


def _in_place(norm: NormWeight, x: torch.Tensor) -> list[int]:
    """The arguments of a norm of rows in place."""
    stride = x.stride(0) * 4
    return named(rms.FIELDS, x=x, weight=norm.at, out=x, x_stride=stride, out_stride=stride)
