"""`python -m tests.memory.interpret interpreted_mixers[:all]`: gated delta nets and attention to latents, in
Triton against the kernels of
core.runtime.program on this CPU, as {case: how many numbers differ}. See interpreted_layer.py."""

import math
from dataclasses import replace

import torch

from core.memory.codec.fast.steps import named, single
from core.runtime.program import absorb, attend, convolve, delta_inputs, delta_rule, latent
from core.runtime.program.absorb import Absorb
from core.runtime.program.absorb import queries as queries_of
from core.runtime.program.absorb import values as values_of
from core.runtime.program.attend_block import Attend
from core.runtime.program.convolve import Convolve
from core.runtime.program.delta_inputs import DeltaInputs
from core.runtime.program.delta_rule import DeltaRule
from core.runtime.program.gpu.delta_kernels import DeltaKernels, Gates, Taken
from core.runtime.program.gpu.latent_kernels import Kept, LatentKernels
from core.runtime.program.gpu.layer import Cached
from core.runtime.program.latent import Latent
from core.runtime.program.rms import Norm
from tests.kernel_cases import CODED
from tests.memory import interpreted_layer as layers
from tests.memory.fast.cases import case
from tests.memory.interpreted_layer import BF16, FP16, FP32, differing
from tests.runtime.program.calls import drawn

CONVOLVED = {
    "Qwen3-Next": Convolve(48, 16, 4, BF16, BF16),
    "with a bias": Convolve(21, 7, 3, FP32, FP16, bias=True),
    "in fp16": Convolve(130, 10, 4, FP16, FP32, bias=True),
}
RULES = {"Qwen3-Next": DeltaRule(2, 16, 4, 16), "odd": DeltaRule(1, 21, 3, 37), "whole": DeltaRule(2, 32, 2, 40)}
LATENTS = {
    "DeepSeek-V3": Latent(3, 16, 8, Norm(40, 1e-6, BF16), BF16, interleaved=True),
    "GLM-4.7-Flash": Latent(2, 24, 16, Norm(64, 1e-5, FP32), FP32),
    "odd": Latent(5, 4, 6, Norm(21, 1e-6, FP16, offset=True), FP16),
}
ABSORBED = "bfloat16", *CODED
MORE = {
    "DeepSeek-V3": Attend(5, 1, 40, 40, BF16, 0.2, more=16),
    "odd": Attend(3, 1, 21, 9, FP32, 0.3, more=6),
    "wide": Attend(4, 2, 72, 72, FP16, 0.1, more=64),
}
PIECES = 5, 1, 2  # rows of the calls that follow each other


def found(which: str) -> dict[str, int]:
    if which != "all":
        return {
            "convolve": convolved(CONVOLVED["Qwen3-Next"]),
            "delta inputs": taken(RULES["odd"]),
            "delta rule": ruled(RULES["odd"]),
            "latents": begun(LATENTS["DeepSeek-V3"]),
            "absorbed": absorbed("int4-g32-sym", 3) + absorbed("mxfp4", 1) + absorbed("bfloat16", 2),
            "attention": attended(MORE["DeepSeek-V3"], (3, 70)),
        }
    differ: dict[str, int] = {}
    for wild in (False, True):
        odd = " of odd numbers" * wild
        differ |= {f"convolve {name}{odd}": convolved(spec, wild=wild) for name, spec in CONVOLVED.items()}
        differ |= {f"delta inputs {name}{odd}": taken(spec, wild=wild) for name, spec in RULES.items()}
        differ |= {f"delta rule {name}{odd}": ruled(spec, wild=wild) for name, spec in RULES.items()}
        differ |= {f"latents {name}{odd}": begun(spec, wild=wild) for name, spec in LATENTS.items()}
        differ |= {f"attention {name}{odd}": attended(spec, (0, 64, 130), wild=wild) for name, spec in MORE.items()}
    return differ | {f"absorbed {name} of {count}": absorbed(name, count) for name in ABSORBED for count in (1, 6)}


def delta() -> DeltaKernels:
    return DeltaKernels(layers.ON.kernels())


def convolved(spec: Convolve, *, wild: bool = False) -> int:
    """Of calls that follow each other, in strips in another order, after one that leaves the state as it is."""
    there, total = layers.ON.there, spec.channels + 5
    columns = torch.arange(0, spec.channels, spec.strip).flip(0) + 3
    weight, bias = drawn(1, spec.size, spec.channels).to(spec.weight), drawn(2, spec.channels).to(spec.weight)
    own = drawn(3, spec.channels, spec.size).to(spec.state)
    here = there(own.clone())
    table, weights, added = there(columns), there(weight), there(bias if spec.bias else None)
    differ = 0
    for number, (rows, holds) in enumerate([(3, True), (1, True), *((rows, False) for rows in PIECES)]):
        one, x = replace(spec, holds=holds), drawn(4 + number, rows, total, wild=wild)
        wanted, got = (torch.empty(rows, spec.channels) for _ in range(2))
        at = {"x": x, "columns": columns, "weight": weight, "state": own, "out": wanted, "rows": rows}
        at |= {"bias": bias} if spec.bias else {}
        single(convolve.kernel(one), named(convolve.FIELDS, x_stride=total * 4, **at), one.units)
        got, states = there(got), there(x)
        delta().convolve(one, states, table, weights, added, here.data_ptr(), got)
        if holds:  # what is kept of some of them, once it is known of how many
            before = own.clone()
            delta().keep(one, states, table, here.data_ptr(), 0)
            differ += differing(here, before)
        differ += differing(got, wanted) + differing(here, own)
    return differ


def taken(rule: DeltaRule, *, wild: bool = False) -> int:
    rows, width = 3, 2 * rule.value_heads + 7
    spec = DeltaInputs(rule.key_heads, rule.key_width, rule.value_heads, rule.channels, FP32, BF16, 1e-6)
    mixed, given = drawn(1, rows, rule.channels, wild=wild), drawn(2, rows, width, wild=wild) * 3
    heads = torch.arange(rule.value_heads)
    parts = 2 * heads + 5, 2 * heads + 4, drawn(3, rule.value_heads), drawn(4, rule.value_heads).to(BF16)
    sizes = rule.key_heads, rule.value_heads, rule.value_heads
    wanted = [torch.empty(rows, size) for size in sizes]
    there = layers.ON.there
    got = delta().inputs(spec, there(mixed.clone()), there(given), Gates(*map(there, parts)))
    at = dict(zip(("a_columns", "b_columns", "a_log", "dt_bias"), parts, strict=True))
    at |= dict(zip(("products", "decays", "rates"), wanted, strict=True))
    single(
        delta_inputs.kernel(spec),
        named(delta_inputs.FIELDS, mixed=mixed, given=given, given_stride=width * 4, **at),
        rows,
    )
    normed = mixed[:, : 2 * rule.key_heads * rule.key_width].contiguous()
    return sum(differing(a, b) for a, b in zip(got[1:], (normed, *wanted), strict=True))


def ruled(spec: DeltaRule, *, wild: bool = False) -> int:
    there, heads, keys = layers.ON.there, spec.value_heads, 2 * spec.key_heads * spec.key_width
    own = drawn(1, heads, spec.key_width, spec.value_width)
    here = there(own.clone())
    differ = 0
    for number, (rows, holds) in enumerate([(3, True), (1, True), *((rows, False) for rows in PIECES)]):
        one, mixed = replace(spec, holds=holds), drawn(2 + number, rows, spec.channels, wild=wild) / math.sqrt(8)
        products, decays, rates = drawn(9, rows, spec.key_heads), drawn(10, rows, heads), drawn(11, rows, heads)
        decays, rates = decays.sigmoid(), rates.sigmoid()
        wanted, got = (torch.empty(rows, heads * spec.value_width) for _ in range(2))
        at = {"mixed": mixed, "products": products, "decays": decays, "rates": rates, "state": own, "out": wanted}
        single(delta_rule.kernel(one), named(delta_rule.FIELDS, rows=rows, **at), heads)
        given = Taken(*map(there, (mixed, mixed[:, :keys].contiguous(), products, decays, rates)))
        got = there(got)
        delta().rule(one, given, here.data_ptr(), got, rows)
        differ += differing(got, wanted) + differing(here, own)
    return differ


def latents() -> LatentKernels:
    return LatentKernels(layers.ON.kernels())


def begun(spec: Latent, *, wild: bool = False) -> int:
    there, rows, context, width = layers.ON.there, 3, 70, spec.norm.width
    queries, kvs = spec.heads * (spec.keys + spec.turned), width + spec.turned
    product = drawn(1, rows, queries + kvs, wild=wild)
    weight = drawn(2, width).to(spec.norm.weight)
    angles = drawn(3, context, spec.turned // 2)
    tables, positions = (angles.cos().contiguous(), angles.sin().contiguous()), torch.tensor([65, 0, 9])
    theirs, ours = (
        [
            torch.full((context, width), 9.0).to(spec.cache),
            torch.full((context, spec.turned), 9.0).to(spec.cache),
            torch.full((rows, spec.heads, width + spec.turned), 9.0),
        ]
        for _ in range(2)
    )
    sizes = width * spec.cache.itemsize, spec.turned * spec.cache.itemsize
    q, kv = product[:, :queries].contiguous(), product[:, queries:].contiguous()
    at = {"q": q, "kv": kv, "weight": weight, "positions": positions, "latent_stride": sizes[0], "key_stride": sizes[1]}
    at |= dict(zip(("cos", "sin"), (table[positions].contiguous() for table in tables), strict=True))
    at |= dict(zip(("latents", "keys", "out"), theirs, strict=True))
    single(latent.kernel(spec), named(latent.FIELDS, **at), rows)
    ours = [there(one) for one in ours]
    here, placed, tables = there(product), there(positions), (there(tables[0]), there(tables[1]))
    kept = Kept(ours[0].data_ptr(), ours[1].data_ptr(), *sizes)
    given = here[:, :queries], here[:, queries:], there(weight), tables, placed, kept, ours[2]
    latents().begin(spec, *given)
    return sum(differing(a, b) for a, b in zip(ours, theirs, strict=True))


def absorbed(name: str, count: int) -> int:
    there, heads, keys, values, turned, width = layers.ON.there, 3, 11, 20, 6, 256
    matrix, slots, _ = case(name, heads * (keys + values), width)
    spec = Absorb(matrix, heads, keys, values, turned)
    x, y = drawn(1, count, heads * (keys + turned)), drawn(2, count, heads, width)
    wanted = torch.full((count, heads, width + turned), 9.0), torch.empty(count, heads * values)
    got = [there(one.clone()) for one in wanted]
    for kernel, given, out in ((queries_of, x, wanted[0]), (values_of, y, wanted[1])):
        single(kernel(spec), named(absorb.FIELDS, x=given, slot=slots[0], out=out, rows=count), heads)
    slot = there(slots[0])
    latents().queries(spec, slot.data_ptr(), there(x), got[0])
    latents().values(spec, slot.data_ptr(), there(y), got[1])
    return sum(differing(a, b) for a, b in zip(got, wanted, strict=True))


def attended(spec: Attend, positions: tuple[int, ...], *, wild: bool = False) -> int:
    """Of queries that go on with numbers that meet what all heads share of a key."""
    there, size, rows, written = layers.ON.there, spec.cache.itemsize, len(positions), max(positions) + 1
    narrow = replace(spec, more=0)
    q, k, v, sinks = layers.states(narrow, written, rows, wild=wild)
    q = torch.cat([q, drawn(5, rows, spec.query_heads, spec.more)], -1).contiguous()
    more = torch.full((k.shape[1], spec.more), torch.nan).to(spec.cache)
    more[:written] = drawn(6, written, spec.more, wild=wild).to(spec.cache)
    wanted = torch.empty(rows, spec.query_heads, spec.values)
    strides = {f"{name}_head_stride": one.stride(0) * size for name, one in (("k", k), ("v", v))}
    strides |= {f"{name}_row_stride": one.stride(1) * size for name, one in (("k", k), ("v", v))}
    strides["more_row_stride"] = spec.more * size
    places = torch.tensor(positions)
    at = {"q": q, "k": k, "v": v, "out": wanted, "positions": places, "sinks": sinks, "more": more}
    given = named(attend.FIELDS, **at, rows=rows, window=attend.NO_WINDOW, **strides)
    single(attend.kernel(spec), given, rows * spec.heads)
    k, v, more = there(k), there(v), there(more)
    order = "k_head_stride", "k_row_stride", "v_head_stride", "v_row_stride"
    cached = Cached(k.data_ptr(), v.data_ptr(), *[strides[name] for name in order], more.data_ptr(), spec.more * size)
    got = there(torch.empty(wanted.shape))
    layers.ON.kernels().attend(spec, there(q), cached, there(places), None, got, written)
    return differing(got, wanted)
