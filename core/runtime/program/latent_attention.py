"""Attention to latents, of which heads make their keys and values: found by trying a layer's module on random states.

The cache keeps a latent and a rotated part of keys for each position. Keys and values are never made: queries are
multiplied by the matrix that would make keys, so that they meet the latents themselves, and the weighted sum of latents
by the one that would make values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from core.errors import ModelError
from core.hf.reserved_layers import Part, Reserved, ReservedLayer
from core.memory.codec.fast.steps import Work, named, single, some
from core.memory.codec.fast.unpack import serves
from core.runtime.program import absorb, attend, latent
from core.runtime.program.absorb import Absorb
from core.runtime.program.attend_block import QUERIES, Attend
from core.runtime.program.latent import Latent
from core.runtime.program.mixer import Pass, norm, row_at
from core.runtime.program.trial import Angles, Trial, trial
from core.runtime.program.weights import NormWeight, Weight, forward, known, near, norm_of, weight_of

LATENT = "kv_a_proj_with_mqa"  # by which such a module is known
LOW = "q_a_proj"  # that makes queries in two steps
AT_ONCE = 128  # rows whose queries are latents at the same time: each head has a whole one


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Queries of `heads`, each of `keys` numbers and `turned` more that are rotated; `values` of each head. `low`: the
    product before that of queries, and its norm."""

    low: tuple[Weight, NormWeight] | None
    q: Weight
    kv: Weight  # a latent, and the part of keys that all heads share
    norm: NormWeight  # of a latent
    expand: Weight  # of a latent, to keys and values of all heads
    o: Weight
    heads: int
    keys: int
    turned: int
    values: int
    scale: float
    angles: Angles
    cache: torch.dtype
    interleaved: bool = False

    @property
    def width(self) -> int:
        """Numbers of a latent."""
        return self.norm.form.width

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part((1, self.width), self.cache), Part((1, self.turned), self.cache)

    @property
    def weights(self) -> Iterator[Weight]:
        return iter((*(self.low or ())[:1], self.q, self.kv, self.o))

    def steps_of(self, texts: Sequence[int]) -> int:
        return 10 + 4 * sum([-(-rows // AT_ONCE) for rows in texts])

    def add(self, to: Pass, number: int, x: torch.Tensor, out: torch.Tensor) -> None:
        q = to.scratch("queries", self.q.outputs)
        kv, mixed = to.scratch("latents", self.kv.outputs), to.scratch("mixed", self.heads * self.values)
        if self.low is None:
            to.product((self.q, self.kv), x, (q, kv))
        else:
            weight, normed = self.low
            low = to.scratch("low", weight.outputs)
            to.product((weight, self.kv), x, (low, kv))
            to.steps.add(norm(normed, low, None, low))
            to.product((self.q,), low, (q,))
        absorbed = to.scratch("absorbed", self.heads * (self.width + self.turned), AT_ONCE)
        summed = to.scratch("summed", self.heads * self.width, AT_ONCE)
        cos, sin = (to.angles(table) for table in (self.angles.cos, self.angles.sin))
        begin = 0
        for text in to.texts:
            for first in range(begin, begin + text.rows, AT_ONCE):
                rows = min(AT_ONCE, begin + text.rows - first)
                at = {"q": q, "kv": kv, "cos": cos, "sin": sin, "mixed": mixed}
                found = {name: row_at(one, first) for name, one in at.items()}
                found |= {"absorbed": absorbed.data_ptr(), "summed": summed.data_ptr()}
                for work in self.works(rows, to.positions + 8 * first, text.held[number].addresses, found):
                    to.steps.add(work)
            begin += text.rows
        to.product((self.o,), mixed, (out,))

    def works(self, rows: int, positions: int, held: Sequence[int], at: dict[str, int]) -> Iterator[Work]:
        """The steps between the products, for some rows. `held`: the addresses of latents and of keys in the cache;
        `at`: those of the first row by name: q [T, heads, keys + turned], kv [T, width + turned], cos, sin; absorbed
        [T, heads, width + turned], summed [T, heads, width], mixed [T, heads, values], which are written."""
        sizes = [width * self.cache.itemsize for width in (self.width, self.turned)]
        kernel = latent.kernel(Latent(self.heads, self.keys, self.turned, self.norm.form, self.cache, self.interleaved))
        given = {name: at[name] for name in ("kv", "q", "cos", "sin")} | {"out": at["absorbed"]}
        given |= dict(zip(("latents", "keys", "latent_stride", "key_stride"), (*held, *sizes), strict=True))
        yield Work(
            kernel, named(latent.FIELDS, weight=self.norm.at, positions=positions, **given), rows, some(rows, 16)
        )
        form = Absorb(self.expand.products.matrix, self.heads, self.keys, self.values, self.turned)
        given = {"slot": self.expand.slot, "rows": rows}
        for kernel, x, out in ((absorb.queries(form), "q", "absorbed"), (absorb.values(form), "summed", "mixed")):
            if out == "mixed":
                yield self._attend(rows, positions, held, sizes, at)
            yield Work(kernel, named(absorb.FIELDS, x=at[x], out=at[out], **given), self.heads, 1)

    def _attend(self, rows: int, positions: int, held: Sequence[int], sizes: Sequence[int], at: dict[str, int]) -> Work:
        """Heads read the same latents: a few of them at a time, so that threads share the work."""
        group = next(size for size in range(min(QUERIES, self.heads), 0, -1) if self.heads % size == 0)
        heads = self.heads // group
        form = Attend(self.heads, heads, self.width, self.width, self.cache, self.scale, more=self.turned)
        given = {"k": held[0], "v": held[0], "k_row_stride": sizes[0], "v_row_stride": sizes[0]}
        given |= {"more": held[1], "more_row_stride": sizes[1], "positions": positions, "rows": rows}
        given |= {"q": at["absorbed"], "out": at["summed"], "window": attend.NO_WINDOW}
        return Work(attend.kernel(form), named(attend.FIELDS, **given), rows * heads, 1)


def latent_of(module: Any, angles: Angles, kept: Reserved, dtype: torch.dtype) -> LatentAttention:
    """The attention of a layer, for states of a type. `kept`: what the KV cache has of the layer."""
    if type(kept) is not ReservedLayer:
        raise ModelError("attention to some of the latents is not known")
    two = getattr(module, LOW, None) is not None
    names = (LOW, "q_a_layernorm", "q_b_proj") if two else ("q_proj",)
    known(module, (*names, LATENT, "kv_a_layernorm", "kv_b_proj", "o_proj"))
    q, kv, expand, o = (weight_of(getattr(module, name)) for name in (names[-1], LATENT, "kv_b_proj", "o_proj"))
    low = (weight_of(module.q_a_proj), norm_of(module.q_a_layernorm)) if two else None
    latents, turned = norm_of(module.kv_a_layernorm), 2 * angles.cos.shape[1]
    heads, keys, values = module.num_heads, module.qk_nope_head_dim, module.v_head_dim
    outputs = heads * (keys + turned), latents.form.width + turned, heads * (keys + values)
    if (q.outputs, kv.outputs, expand.outputs) != outputs or expand.bias is not None:
        raise ModelError("latents or heads of this form are not known")
    if not serves(expand.products.matrix):
        raise ModelError("keys and values cannot be read from the format of their weights")
    form = LatentAttention(
        low, q, kv, latents, expand, o, heads, keys, turned, values, float(module.scaling), angles, dtype
    )
    seen = trial(module, angles, dtype, kv.inputs)
    if seen.keys.shape[-1] != latents.form.width or seen.values.shape[-1] != turned:
        raise ModelError("this version of transformers keeps keys and values in place of latents")
    for interleaved in (False, True):
        tried = replace(form, interleaved=interleaved)
        if _agrees(tried, module, seen):
            return tried
    raise ModelError(f"{type(module).__name__} computes in a way that is not known")


@torch.inference_mode()
def _agrees(form: LatentAttention, module: Any, seen: Trial) -> bool:
    """Whether latents, keys and results differ from the module's by no more than rounding. Pairs that are turned may
    lie in another order."""
    rows = len(seen.x)
    low = seen.x if form.low is None else forward(module.q_a_layernorm, module.q_a_proj(seen.x))
    q = (module.q_proj if form.low is None else module.q_b_proj)(low).float().contiguous()
    kv = getattr(module, LATENT)(seen.x).float().contiguous()
    latents, keys = (torch.empty(rows, width, dtype=form.cache) for width in (form.width, form.turned))
    absorbed, summed, mixed = (
        torch.empty(rows, form.heads * width) for width in (form.width + form.turned, form.width, form.values)
    )
    given = dict(q=q, kv=kv, cos=seen.cos, sin=seen.sin, absorbed=absorbed, summed=summed, mixed=mixed)
    held = latents.data_ptr(), keys.data_ptr()
    at = {name: one.data_ptr() for name, one in given.items()}
    for work in form.works(rows, seen.positions.data_ptr(), held, at):
        single(work.kernel, work.arguments, work.units)
    halves = seen.values[0].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    turned = any(near(keys, one) for one in (seen.values[0], halves)[: 1 + form.interleaved])
    return turned and near(latents, seen.keys[0]) and near(module.o_proj(mixed.to(form.cache)), seen.output)
