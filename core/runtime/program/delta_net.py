"""Gated delta nets: a convolution of queries, keys and values over the tokens, and states that these read and change.
Found by trying a layer's module on random states."""

import inspect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, LinearAttentionLayer

from core.errors import ModelError
from core.hf.cache import ReservedStates
from core.hf.reserved_layers import Part, Reserved
from core.memory.codec.fast.steps import Place, Work, named, single, some
from core.runtime.program import convolve, delta_inputs, delta_rule, gated_heads
from core.runtime.program.convolve import Convolve
from core.runtime.program.delta_inputs import DeltaInputs
from core.runtime.program.delta_rule import DeltaRule
from core.runtime.program.gated_heads import GatedHeads
from core.runtime.program.mixer import ACCEPTED, Pass, row_at
from core.runtime.program.rms import Norm
from core.runtime.program.weights import FP32, TRIED, Weight, drawn, forward, known, near, weight_of

GROUPED = "in_proj_qkvz", "in_proj_ba"  # of each key head, what reads it is together
SPLIT = "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"
EPS = 1e-6  # of the norms of queries and keys
PIECES = 7, 1, TRIED - 8  # rows of the calls of a trial: with no state, of a token, and of several that follow


class Columns(NamedTuple):
    """Where the products of a row begin, int64: of each strip of channels, of each value head's gates, and a and b."""

    channels: torch.Tensor
    gates: torch.Tensor
    a: torch.Tensor
    b: torch.Tensor


class Room(NamedTuple):
    """What is between the products of so many rows, fp32."""

    mixed: torch.Tensor  # [T, channels], queries, keys and values
    products: torch.Tensor  # [T, key_heads]
    decays: torch.Tensor  # [T, value_heads]
    rates: torch.Tensor  # [T, value_heads]
    heads: torch.Tensor  # [T, value_heads * value_width]


class States(NamedTuple):
    """The rows of one sequence, and the addresses of its states."""

    rows: int
    inputs: int
    matrices: int


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """`given` gives queries, keys, values, gates, a and b of a row, at `columns`."""

    given: tuple[Weight, ...]
    out: Weight
    columns: Columns
    convolve: Convolve
    inputs: DeltaInputs
    rule: DeltaRule
    gated: GatedHeads
    weight: torch.Tensor  # [size, channels], of the convolution
    bias: torch.Tensor | None
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor

    @property
    def parts(self) -> tuple[Part, ...]:
        rule, mixed = self.rule, self.convolve
        return (
            Part((mixed.channels, mixed.size), mixed.state),
            Part((rule.value_heads, rule.key_width, rule.value_width), FP32),
        )

    @property
    def weights(self) -> Iterator[Weight]:
        return iter((*self.given, self.out))

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of a row of each field of a `Room`."""
        rule = self.rule
        return rule.channels, rule.key_heads, rule.value_heads, rule.value_heads, self.out.inputs

    def steps_of(self, texts: Sequence[int]) -> int:
        return 4 * len(self.given) + 5 + 4 * len(texts)

    def add(self, to: Pass, number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        name = f"given {number}" if to.holds else "given"  # which is wanted later
        given = to.scratch(name, sum([weight.outputs for weight in self.given]))
        room = Room(
            *[to.scratch(f"delta {name}", width) for name, width in zip(Room._fields, self.widths, strict=True)]
        )
        first, outs = 0, list[torch.Tensor]()
        for weight in self.given:
            outs.append(given[:, first:])
            first += weight.outputs
        to.product(self.given, x, outs)
        texts = [States(one.rows, *one.held[number].addresses) for one in to.texts]
        to.steps.extend(self.works(given, room, texts, to.holds))
        to.product((self.out,), room.heads, (out,))
        if to.holds:
            accepted = [one._replace(rows=Place(one.rows, ACCEPTED)) for one in texts]
            to.later += self._read(given, room, accepted, False)

    def works(self, given: torch.Tensor, room: Room, texts: Sequence[States], holds: bool = False) -> Iterator[Work]:
        """Compute the heads of all rows [T, n] that were given, and bring each sequence's states up to date unless
        they are to be what they were."""
        yield from self._read(given, room, texts, holds)
        at: dict[str, int | torch.Tensor] = {"x": room.heads, "gates": given, "gates_stride": given.stride(0) * 4}
        at |= {"columns": self.columns.gates, "weight": self.norm}
        units = len(given) * self.gated.heads
        yield Work(gated_heads.kernel(self.gated), named(gated_heads.FIELDS, **at), units, some(units))

    def _read(self, given: torch.Tensor, room: Room, texts: Sequence[States], holds: bool) -> Iterator[Work]:
        """What rows read from the states."""
        mixed, rule = replace(self.convolve, holds=holds), replace(self.rule, holds=holds)
        stride, begin = given.stride(0) * 4, 0
        at: dict[str, int | torch.Tensor] = {"columns": self.columns.channels, "weight": self.weight}
        at |= {} if self.bias is None else {"bias": self.bias}
        for rows, inputs, _ in texts:
            at |= {"x": row_at(given, begin), "out": row_at(room.mixed, begin), "x_stride": stride, "rows": rows}
            units, arguments = mixed.units, named(convolve.FIELDS, state=inputs, **at)
            yield Work(convolve.kernel(mixed), arguments, units, some(units))
            begin += rows
        at = {name: getattr(room, name) for name in ("mixed", "products", "decays", "rates")}
        at |= {name: getattr(self, name) for name in ("a_log", "dt_bias")}
        at |= {"a_columns": self.columns.a, "b_columns": self.columns.b}
        arguments = named(delta_inputs.FIELDS, given=given, given_stride=stride, **at)
        yield Work(delta_inputs.kernel(self.inputs), arguments, len(given), some(len(given)))
        begin = 0
        for rows, _, matrices in texts:
            at = {name: row_at(getattr(room, name), begin) for name in ("mixed", "products", "decays", "rates")}
            arguments = named(delta_rule.FIELDS, state=matrices, out=row_at(room.heads, begin), rows=rows, **at)
            yield Work(delta_rule.kernel(rule), arguments, rule.value_heads, 1)
            begin += rows


def delta_net_of(module: Any, kept: Reserved, dtype: torch.dtype) -> DeltaNet:
    """The gated delta net of a layer, for states of a type. `kept`: what the KV cache has of the layer."""
    names = GROUPED if hasattr(module, GROUPED[0]) else SPLIT
    known(module, (*names, "conv1d", "dt_bias", "A_log", "norm", "out_proj"))
    if type(kept) is not ReservedStates or len(kept.conv_states) > 1:
        raise ModelError("layers with states of other kinds are not known")
    conv, gated = module.conv1d, module.norm
    key_heads, value_heads = module.num_k_heads, module.num_v_heads
    key_width, value_width = module.head_k_dim, module.head_v_dim
    given, out = tuple([weight_of(getattr(module, name)) for name in names]), weight_of(module.out_proj)
    if value_heads % key_heads or out.inputs != value_heads * value_width:
        raise ModelError("heads of this form are not known")
    rule = DeltaRule(key_heads, key_width, value_heads, value_width)
    strip = math.gcd(key_width, value_width)
    columns = (_grouped if names == GROUPED else _split)(rule, strip)
    channels, total = rule.channels, rule.channels + value_heads * (value_width + 2)
    if type(conv) is not nn.Conv1d or conv.weight.shape[:2] != (channels, 1) or conv.groups != channels:
        raise ModelError("convolutions of this form are not known")
    if sum([weight.outputs for weight in given]) != total:
        raise ModelError("queries, keys and values of this form are not known")
    eps = getattr(gated, "variance_epsilon", getattr(gated, "eps", None))
    if not isinstance(eps, float):
        raise ModelError(f"norms of the kind {type(gated).__name__} are not known")
    bias = None if conv.bias is None else conv.bias.detach()
    weight, norm = conv.weight.detach()[:, 0].t().contiguous(), gated.weight.detach()
    a_log, dt_bias = module.A_log.detach(), module.dt_bias.detach()
    form = DeltaNet(
        given,
        out,
        columns,
        Convolve(channels, strip, weight.shape[0], dtype, weight.dtype, bias is not None),
        DeltaInputs(key_heads, key_width, value_heads, channels, a_log.dtype, dt_bias.dtype, EPS),
        rule,
        GatedHeads(value_heads, value_width, "silu", Norm(value_width, eps, norm.dtype)),
        weight,
        bias,
        a_log,
        dt_bias,
        norm,
    )
    _try(form, module, names, dtype)
    return form


def _split(rule: DeltaRule, strip: int) -> Columns:
    """All queries, keys and values; all gates; b; a."""
    gates = rule.channels + torch.arange(rule.value_heads) * rule.value_width
    b = rule.channels + rule.value_heads * rule.value_width + torch.arange(rule.value_heads)
    return Columns(torch.arange(0, rule.channels, strip), gates, b + rule.value_heads, b)


def _grouped(rule: DeltaRule, strip: int) -> Columns:
    """Of each key head its queries and keys, then values of the value heads that read it, and then their gates. After
    all of them, of each key head, b of these value heads, and then a."""
    group = rule.value_heads // rule.key_heads
    size = 2 * (rule.key_width + group * rule.value_width)
    begins = torch.arange(rule.key_heads) * size
    queries, values = torch.arange(0, rule.key_width, strip), torch.arange(0, group * rule.value_width, strip)
    parts = (0, queries), (rule.key_width, queries), (2 * rule.key_width, values)
    channels = torch.cat([(begins[:, None] + after + of).flatten() for after, of in parts])
    values = torch.arange(group)
    gates = begins[:, None] + 2 * rule.key_width + (group + values) * rule.value_width
    b = rule.key_heads * size + 2 * group * torch.arange(rule.key_heads)[:, None] + values
    return Columns(channels, gates.flatten(), (b + group).flatten(), b.flatten())


@torch.inference_mode()
def _try(form: DeltaNet, module: Any, names: Sequence[str], dtype: torch.dtype) -> None:
    """Raises ModelError where states or results differ by more than rounding, in calls that follow each other."""
    x = drawn(dtype, 1, TRIED, form.given[0].inputs)
    layer, cache = LinearAttentionLayer(), DynamicCache()
    cache.layers = [layer] * (module.layer_idx + 1)
    name = "cache" if "cache" in inspect.signature(type(module).forward).parameters else "cache_params"
    inputs, matrices = (torch.zeros(shape, dtype=kind) for shape, kind in form.parts)
    for piece in x.split(PIECES, 1):
        wanted = forward(module, piece, **{name: cache})[0]
        given = torch.cat([getattr(module, one)(piece[0]).float() for one in names], -1).contiguous()
        room = Room(*[torch.empty(len(given), width) for width in form.widths])
        for work in form.works(given, room, [States(len(given), inputs.data_ptr(), matrices.data_ptr())]):
            single(work.kernel, work.arguments, work.units)
        states = (inputs, layer.conv_states[0]), (matrices, layer.recurrent_states[0])
        if not (
            near(module.out_proj(room.heads.to(dtype)), wanted)
            and all(of is not None and of.shape[1:] == own.shape and near(own, of[0]) for own, of in states)
        ):
            raise ModelError(f"{type(module).__name__} computes in a way that is not known")
