"""`python -m tests.memory.interpret interpreted_layer[:all]`: what a decoder layer computes beside its experts, in
Triton against the kernels of core.runtime.program on this CPU, as {case: how many numbers differ}. A NaN is as good as
another; of zeros the signs are compared, too. tests/gpu/test_fast.py has a real GPU compute it."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch

from core.memory.codec.fast.gpu import dense
from core.memory.codec.fast.gpu.dense import TILED, DenseKernels, Placed
from core.memory.codec.fast.steps import named, single
from core.memory.codec.kernels import ByTriton, Launcher
from core.runtime.program import attend, cap, gate, gated_heads, rms, rotate, route
from core.runtime.program.attend_block import Attend
from core.runtime.program.choose import Groups
from core.runtime.program.gate import Gate
from core.runtime.program.gated_heads import GatedHeads
from core.runtime.program.gpu import layer
from core.runtime.program.rms import Norm
from core.runtime.program.rotate import Rotate
from core.runtime.program.route import Route
from tests.memory.fast import product_oracle
from tests.memory.fast.cases import GATES, case, rows
from tests.runtime.program.calls import drawn

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NORMS = {
    "an odd width": (Norm(21, 1e-6, BF16), 1.0, False),
    "added": (Norm(136, 1e-5, FP32, offset=True), 1.0, True),
    "scaled": (Norm(40, 1e-6, FP16), 0.37, True),
    "without weights": (Norm(264, 1e-6), 1.0, False),
}
ROTATED = {
    "Qwen3": Rotate(4, 2, 16, 16, BF16, Norm(16, 1e-6, BF16)),
    "Qwen2": Rotate(2, 1, 12, 12, FP32, bias=FP16),
    "interleaved": Rotate(3, 3, 44, 28, BF16, Norm(44, 1e-6), FP32, interleaved=True),
    "in part": Rotate(6, 2, 40, 20, FP16, Norm(40, 1e-5, FP32, offset=True), BF16),
    "normed last": Rotate(4, 2, 20, 16, BF16, Norm(20, 1e-6, BF16), norm_last=True, value_norm=Norm(20, 1e-6)),
    "gated": Rotate(4, 2, 16, 8, BF16, Norm(16, 1e-6, BF16, offset=True), gated=True),
    "in a ring": Rotate(4, 1, 8, 0, FP32, ring=64),
}
ATTENDED = {
    "Qwen3": Attend(8, 2, 16, 16, BF16, 0.25),
    "odd": Attend(3, 1, 12, 20, FP32, 0.3),
    "wide": Attend(2, 2, 136, 40, FP16, 0.09),
    "sinks": Attend(4, 1, 72, 8, BF16, 0.12, sinks=True),
}
ROUTED = {
    "Qwen3": Route(21, 4, renormalised=True),
    "OLMoE": Route(64, 8),
    "Mixtral": Route(8, 2, "softmax_chosen"),
    "corrected": Route(16, 10, "sigmoid", bias=True, renormalised=True, epsilon=1e-20, scale=2.5),
    "few": Route(5, 5, "softmax", bias=True, scale=0.5),
    "many": Route(40, 19, "softmax_chosen"),
    "DeepSeek-V3": Route(24, 5, "sigmoid", True, True, 1e-20, 2.5, groups=Groups(4, 6, 2)),
    "DeepSeek-V2": Route(27, 3, scale=16.0, groups=Groups(9, 3, 2, best=1)),
    "Gemma 4": Route(16, 4, renormalised=True, scales=True),
}
GATED = {
    "Qwen3-Next": GatedHeads(3, 16, "sigmoid"),
    "Qwen3-Next's delta nets": GatedHeads(2, 21, "silu", Norm(21, 1e-6, BF16)),
    "an odd width": GatedHeads(1, 7, "silu", Norm(7, 1e-5, FP32, offset=True)),
}
JOINED = (
    (("int4-g64", 9), ("int8-g32", 17), ("int4-g64", 40)),  # x is prepared in two ways
    (("bfloat16", 33), ("bfloat16", 1), ("float32", 7)),
    (("int3", 20), ("mxfp4", 5)),
    (("int8-g32", 64), ("int4-g64", 64)),
)


class On(NamedTuple):
    """What computes: a device, and what launches its kernels."""

    device: torch.device
    launcher: Launcher

    def there(self, one: torch.Tensor | None) -> Any:
        return one if one is None or one.device == self.device else one.to(self.device)

    def kernels(self) -> layer.LayerKernels:
        return layer.LayerKernels(self.launcher)


ON = On(torch.device("cpu"), ByTriton)


def differing(got: torch.Tensor, wanted: torch.Tensor) -> int:
    """Numbers whose bits differ."""
    got = got.cpu()
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    ints = {4: torch.int32, 2: torch.int16, 8: torch.int64}[got.element_size()]
    differ = got.view(ints) != wanted.view(ints)
    if got.is_floating_point():
        differ &= ~(got.isnan() & wanted.isnan())
    return int(differ.sum())


def found(which: str) -> dict[str, int]:
    if which != "all":
        return {
            "norm": normed(*NORMS["scaled"], wild=False),
            "rotate": turned(ROTATED["in part"], wild=False) + turned(ROTATED["normed last"], wild=False),
            "route": sum(
                routed(ROUTED[name], wild=name == "few") for name in ("corrected", "few", "DeepSeek-V3", "Gemma 4")
            ),
            "attend": attended(ATTENDED["sinks"], (129,), window=65),
            "product": multiplied(JOINED[0][:2], 1) + multiplied(JOINED[0][:1], 3),
            "activation": activated(GATES["oss"]),
            "gated": gated(GATED["Qwen3-Next's delta nets"], wild=False),
            "cap": capped(wild=True),
            "then norm": normed_by_the_last(JOINED[-1], wild=False),
            "then route": sum(routed_by_the_last(ROUTED[name]) for name in ("few", "DeepSeek-V3")),
        }
    differ = {"attend in a ring": in_a_ring()}
    for wild in (False, True):
        odd = " of odd numbers" * wild
        differ |= {f"norm {name}{odd}": normed(*how, wild=wild) for name, how in NORMS.items()}
        differ |= {f"rotate {name}{odd}": turned(spec, wild=wild) for name, spec in ROTATED.items()}
        differ |= {f"route {name}{odd}": routed(spec, wild=wild) for name, spec in ROUTED.items()}
        differ |= {f"gated {name}{odd}": gated(spec, wild=wild) for name, spec in GATED.items()}
        differ[f"cap{odd}"] = capped(wild=wild)
        for name, spec in ATTENDED.items():
            differ |= {f"attend {name}{odd} {at[-1]}": attended(spec, at, wild=wild) for at in ((0, 3), (63, 64, 140))}
            differ[f"attend {name}{odd} window"] = attended(spec, (70, 129), window=65, wild=wild)
        differ |= {f"then norm {names[0][0]}{odd}": normed_by_the_last(names, wild=wild) for names in JOINED}
    differ |= {f"then route {name}": routed_by_the_last(spec) for name, spec in ROUTED.items()}
    for names in JOINED:
        label = "product " + " ".join(name for name, _ in names)
        differ |= {f"{label} of {count}": multiplied(names, count) for count in (1, 5, TILED + 1)}
    return differ | {f"activation {name}": activated(spec) for name, spec in GATES.items()}


def normed(of: Norm, scale: float, adds: bool, *, wild: bool) -> int:
    """Of three rows, which are further apart than they are wide."""
    rows, width = 3, of.width
    x, delta = drawn(1, rows, width + 5, wild=wild), drawn(2, rows, width, wild=wild)
    weight = drawn(3, width, wild=wild).to(of.weight) if of.weight else None
    other, times = x.clone(), torch.tensor([1.5])
    wanted = torch.empty(rows, width)
    at = {"x": x, "out": wanted} | ({"delta": delta, "factor": times} if adds else {})
    at |= {} if weight is None else {"weight": weight}
    spec = rms.Rms(of, adds=adds, scale=scale, factor=adds)
    strides = {"x_stride": x.stride(0) * 4, "out_stride": width * 4}
    single(rms.kernel(spec), named(rms.FIELDS, **at, **strides), rows)
    other, got = ON.there(other), torch.empty(rows, width, device=ON.device)
    more = [ON.there(one if adds else None) for one in (delta, times)]
    ON.kernels().norm(of, ON.there(weight), other[:, :width], more[0], got, scale, more[1])
    return differing(got, wanted) + differing(other, x)


def turned(spec: Rotate, *, wild: bool) -> int:
    rows, context, width = 3, 70, spec.width
    size, heads = width * spec.cache.itemsize, spec.keys + 2 * spec.heads
    qkv = drawn(1, rows, heads * width, wild=wild)
    bias = drawn(2, heads * width).to(spec.bias) if spec.bias else None
    stored = spec.norm.weight if spec.norm else None
    weights = [drawn(3 + i, width).to(stored) if stored else None for i in range(2)]
    angles = drawn(5, context, spec.rotated // 2)
    tables, positions = (angles.cos().contiguous(), angles.sin().contiguous()), torch.tensor([65, 0, 9])
    ours, theirs = (
        (
            torch.full((rows, spec.query_heads, width), 9.0),
            torch.full((spec.heads, context, width), 9.0).to(spec.cache),
            torch.full((context, spec.heads, width), 9.0).to(spec.cache),
        )
        for _ in range(2)
    )
    strides = {
        "k_head_stride": context * size,
        "k_row_stride": size,
        "v_head_stride": size,
        "v_row_stride": spec.heads * size,
    }
    at = dict(zip("qkv", theirs, strict=True)) | dict(zip(("q_weight", "k_weight"), weights, strict=True))
    at |= dict(zip(("cos", "sin"), (table[positions].contiguous() for table in tables), strict=True)) | {"bias": bias}
    there = {name: one for name, one in at.items() if one is not None}
    given = named(rotate.FIELDS, qkv=qkv, positions=positions, **there, **strides)
    single(rotate.kernel(spec), given, rows * spec.heads)
    ours = tuple([ON.there(one) for one in ours])
    q, k, v = ours
    cached = layer.Cached(k.data_ptr(), v.data_ptr(), *strides.values())
    here = [ON.there(one) for one in (qkv, bias, *weights, *tables, positions)]
    ON.kernels().rotate(spec, here[0], here[1], (here[2], here[3]), (here[4], here[5]), here[6], q, cached)
    return sum(differing(a, b) for a, b in zip(ours, theirs, strict=True))


def routed(spec: Route, *, wild: bool) -> int:
    tokens = 4
    logits = drawn(1, tokens, spec.experts, wild=wild) * 3
    logits[1], logits[2, :2] = 0.25, torch.tensor([-0.0, 0.0])
    bias, scales = (drawn(seed, spec.experts) if has else None for seed, has in ((2, spec.bias), (3, spec.scales)))
    ids, weights = torch.empty(tokens, spec.chosen, dtype=torch.int64), torch.empty(tokens, spec.chosen)
    more = {name: one for name, one in (("bias", bias), ("scales", scales)) if one is not None}
    at = {"logits": logits, "ids": ids, "weights": weights} | more
    single(route.kernel(spec), named(route.FIELDS, **at), tokens)
    got = ON.kernels().route(spec, *map(ON.there, (logits, bias, scales)))
    return differing(got[0], ids) + differing(got[1], weights)


def gated(spec: GatedHeads, *, wild: bool) -> int:
    """Of rows whose gates are among other numbers, in another order than the heads."""
    rows, width = 3, spec.width
    x, gates = drawn(1, rows, spec.heads * width, wild=wild), drawn(2, rows, spec.heads * width + 9, wild=wild)
    columns = (torch.arange(spec.heads) * width + 4).flip(0).contiguous()
    weight = drawn(3, width).to(spec.norm.weight) if spec.norm and spec.norm.weight else None
    here = [ON.there(one) for one in (x.clone(), gates, columns, weight)]
    got = ON.kernels().gate(spec, *here)
    at = {"x": x, "gates": gates, "columns": columns} | ({} if weight is None else {"weight": weight})
    given = named(gated_heads.FIELDS, gates_stride=gates.stride(0) * 4, **at)
    single(gated_heads.kernel(spec), given, rows * spec.heads)
    return differing(got, x)


def capped(*, wild: bool) -> int:
    x = drawn(1, 3, 411, wild=wild) * 40
    got = ON.there(x.clone())
    ON.kernels().cap(got, 30.0)
    cap.capped(x, 30.0)
    return differing(got, x)


def attended(spec: Attend, positions: tuple[int, ...], window: int = 0, *, wild: bool = False) -> int:
    q, k, v, sinks = states(spec, max(positions) + 1, len(positions), wild=wild)
    return compared(spec, q, k, v, sinks, torch.tensor(positions), window)


def states(spec: Attend, written: int, rows: int, *, wild: bool) -> list[torch.Tensor]:
    capacity = written + 9
    q = drawn(1, rows, spec.query_heads, spec.width, wild=wild) * 2
    k, v = (torch.full((spec.heads, capacity, n), torch.nan).to(spec.cache) for n in (spec.width, spec.values))
    for seed, of in ((2, k), (3, v)):
        of[:, :written] = drawn(seed, spec.heads, written, of.shape[2], wild=wild).to(spec.cache)
    sinks = drawn(4, spec.query_heads)
    if wild:
        sinks[0] = torch.nan
    return [q, k, v, sinks]


def compared(
    spec: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor,
    positions: torch.Tensor,
    window: int,
) -> int:
    rows, size = len(positions), spec.cache.itemsize
    wanted = torch.empty(rows, spec.query_heads, spec.values)
    strides = {f"{name}_head_stride": one.stride(0) * size for name, one in (("k", k), ("v", v))}
    strides |= {f"{name}_row_stride": one.stride(1) * size for name, one in (("k", k), ("v", v))}
    at = {"q": q, "k": k, "v": v, "out": wanted, "positions": positions, "sinks": sinks}
    given = named(attend.FIELDS, **at, rows=rows, window=window or attend.NO_WINDOW, **strides)
    single(attend.kernel(spec), given, rows * spec.heads)
    names = "k_head_stride", "k_row_stride", "v_head_stride", "v_row_stride"
    most, got = int(positions.max()) + 1, torch.empty(wanted.shape, device=ON.device)
    q, k, v, positions = (ON.there(one) for one in (q, k, v, positions))
    cached = layer.Cached(k.data_ptr(), v.data_ptr(), *(strides[name] for name in names))
    own = ON.there(sinks if spec.sinks else None)
    ON.kernels().attend(spec, q, cached, positions, own, got, most, window)
    return differing(got, wanted)


def in_a_ring() -> int:
    """Keys that lie where their position mod 128 would."""
    spec, ring, last = replace(ATTENDED["sinks"], ring=128), 128, 391
    q, k, v, sinks = states(spec, last + 1, 2, wild=False)
    kept = torch.arange(last + 1 - ring, last + 1)
    turned = [torch.full((spec.heads, ring, one.shape[2]), torch.nan).to(spec.cache) for one in (k, v)]
    for into, one in zip(turned, (k, v), strict=True):
        into[:, kept % ring] = one[:, kept]
    return compared(spec, q, *turned, sinks, torch.tensor([last - 1, last]), 60)


def multiplied(names: tuple[tuple[str, int], ...], count: int) -> int:
    """Of some rows by several matrices at once, with a bias and without."""
    cases = [case(name, outputs, 192) for name, outputs in names]
    x = rows(count, 192, FP32)
    wanted = torch.cat([product_oracle.product(one, slots[0], x) for one, slots, _ in cases], 1)
    here = [ON.there(slots[0]) for _, slots, _ in cases]
    placed = [Placed(one, slot.data_ptr()) for (one, _, _), slot in zip(cases, here, strict=True)]
    bias = drawn(1, wanted.shape[1]).to(BF16)
    differ = 0
    for added in (None, bias):
        got = DenseKernels(ON.launcher).by(placed, ON.there(added))(ON.there(x))
        differ += differing(got, wanted if added is None else wanted + added.float())
    return differ


def placed_by(names: tuple[tuple[str, int], ...]) -> tuple[dense.DenseProducts, list[torch.Tensor]]:
    """A product by such matrices of 192 inputs, and what holds them."""
    cases = [case(name, outputs, 192) for name, outputs in names]
    here = [ON.there(slots[0]) for _, slots, _ in cases]
    placed = [Placed(one, slot.data_ptr()) for (one, _, _), slot in zip(cases, here, strict=True)]
    return DenseKernels(ON.launcher).by(placed), here


def normed_by_the_last(names: tuple[tuple[str, int], ...], *, wild: bool) -> int:
    """Twice in turn, as a counter has to be 0 again, what a product's last program norms and prepares for two kinds of
    codes, against launches of their own; and what is prepared, multiplied."""
    product, held = placed_by(names)
    kernels, width, differ = ON.kernels(), product.outputs, 0
    of, weight = Norm(width, 1e-6, BF16), ON.there(drawn(3, width).to(BF16))
    takers = [case(name, 5, -(-width // 64) * 64) for name in ("int4-g64", "int8-g32")] if width % 64 == 0 else []
    after = [DenseKernels(ON.launcher).by([Placed(one, ON.there(slots[0]).data_ptr())]) for one, slots, _ in takers]
    for seed in (1, 2):
        x, states = ON.there(drawn(seed, 1, 192, wild=wild)), drawn(seed + 4, 1, width, wild=wild)
        wanted, ours = (ON.there(states.clone()) for _ in range(2))
        normed, got = torch.empty_like(wanted), torch.empty_like(ours)
        kernels.norm(of, weight, wanted, product(x), normed, 0.37)
        end, ready = kernels.then_norm(of, weight, ours, got, 0.37, tuple(form for one in after for form in one.takers))
        differ += differing(product(x, end=end), product(x).cpu())
        differ += differing(got, normed.cpu()) + differing(ours, wanted.cpu())
        differ += sum(differing(one(got, ready), one(normed).cpu()) for one in after)
    assert held
    return differ


def routed_by_the_last(spec: Route) -> int:
    """Twice in turn, what a router's last program chooses, against a launch of its own."""
    product, held = placed_by((("bfloat16", spec.experts),))
    kernels, differ = ON.kernels(), 0
    bias, scales = (
        ON.there(drawn(seed, spec.experts)) if has else None for seed, has in ((2, spec.bias), (3, spec.scales))
    )
    for seed in (1, 2):
        x = ON.there(drawn(seed, 1, 192))
        logits = product(x)
        wanted = kernels.route(spec, logits, bias, scales)
        end, *got = kernels.then_route(spec, bias, scales, ON.device)
        differ += differing(product(x, end=end), logits.cpu())
        differ += sum(differing(one, other.cpu()) for one, other in zip(got, wanted, strict=True))
    assert held
    return differ


def activated(spec: Gate) -> int:
    """Of two rows of a width that is no power of two."""
    found, x = replace(spec, width=37), drawn(1, 2, 74) * 4
    wanted = torch.empty(2, 37)
    single(gate.kernel(found), named(gate.FIELDS, x=x, out=wanted), 2 * found.units)
    return differing(ON.kernels().activate(found, ON.there(x)), wanted)
