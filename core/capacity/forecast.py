"""The speed to expect before a model is loaded: ranges of hit rate and tokens per second, and their basis.

The hit rate is that of the chosen policy and prefetcher on recorded routing, or without any between two bounds. A token
takes its compute time and the copies of its misses: with times of recorded passes as the simulator's clock has it, and
without between two bounds, one after the other and overlapped, from short measurements on this machine.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from core.capacity.sizes import Sizes
from core.errors import MoestroError
from core.memory.codec import Codec
from core.memory.codec.base import Base
from core.memory.codec.fast.products import CanonicalProducts, serves
from core.memory.codec.kernels import make_kernels
from core.memory.codec.layers import LayerCodecs
from core.memory.codec.matrix import Matrix, Part, matrix
from core.memory.link import Link
from core.policy.allocation.slot_allocation import check_needs
from core.profile import Profile
from core.profile.trace import ArrayTrace, Chunk
from core.settings.config import Settings
from core.settings.registry import variant
from core.simulate import Clock, Config
from core.simulate.prefetchers import TimedConfig, timed
from core.simulate.replay import Replay
from core.simulate.run import maker
from core.system.native import openmp

Trace = npt.NDArray[np.int16]
"""Routing of decoded tokens: expert ids [tokens, layers, k]."""

BLOCK_MS = (0.15, 0.6)  # a transformer block's time besides its weights: least and most seen on CPUs
FAST_BLOCK_MS = (0.02, 0.3)  # in the fast arithmetic
SPREAD = 0.1  # of the speed that a clock predicts: what the machine's own changes of speed come to at least
RECORDED = 24  # tokens, of which fewer say nothing about a policy
AHEAD, LEAST_AHEAD = 1600, 32  # recorded tokens x layers that a prefetcher is replayed on, and tokens at least
COLD = 64 << 20  # bytes of slots cycled through when timing an expert: more than processor caches hold
LONGEST_S = 0.05  # of one timing
REPORTED = np.array(((0.0, 0.0), (0.05, 0.366), (0.15, 0.74), (0.30, 0.89), (0.50, 0.96), (1.0, 1.0)))
# share of slots -> hit rate of LRU as others report it for Qwen3-30B-A3B: routing about as local as it gets


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds measured on this machine."""

    expert_ms: float  # one expert's products for one token
    memory_gbps: float  # reading dense weights in a product
    block_ms: tuple[float, float] = BLOCK_MS


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of a model from its use on this machine."""

    link: Link | None = None  # of the loaded model, or of its last load; None = to be measured
    trace: Trace | None = None
    clock: Clock | None = None  # fitted to passes under these loading choices, its copies those of the requested link
    passes: int = 0  # behind the clock
    error: float = 0.0  # of the clock: |predicted - measured| / measured of these passes
    slowdown: float = 1.0  # time of all these passes, those that other programs disturbed too, over the clock's
    profile: Profile | None = None  # of the model


@dataclass(frozen=True, slots=True)
class Forecast:
    """Ranges, and their basis in the user's words."""

    hit: tuple[float, float]
    tok_s: tuple[float, float]
    basis: str


def forecast(
    sizes: Sizes, slots: int, settings: Settings, speeds: Speeds, link: Link, where: str, seen: Seen
) -> Forecast:
    """`link` serves misses; `where` names it for the user ("from disk at 1.2 GB/s")."""
    total, shape = sizes.shape.total, sizes.shape
    slots, trace = min(slots, total), seen.trace
    played = None
    if trace is not None and len(trace) >= RECORDED and trace.shape[1:] == (shape.layers, shape.top_k):
        own = slots * shape.layers // shape.cached_layers  # without those of a head
        played = replayed(trace, shape.experts, own, settings, sizes.blob, seen)
    if played is not None and played.tpot_ms is not None:
        wide = max(SPREAD, seen.error)
        tpot_ms = played.tpot_ms * seen.slowdown
        fast = 1e3 / (tpot_ms * (1 + wide)), 1e3 / (tpot_ms * max(1 - wide, 0.1))
        basis = f"{played.basis}; times of {seen.passes} tokens of your answers, their misses {where}"
        return Forecast((played.hit, played.hit), fast, basis)
    if slots >= total:
        hit, basis = (1.0, 1.0), "everything is resident"
    elif played is not None:
        hit, basis = (played.hit, played.hit), f"hit rate: {played.basis}"
    else:
        share = slots / total
        reported = float(np.interp(share, REPORTED[:, 0], REPORTED[:, 1]))
        hit = (share, max(share, reported))
        basis = "rough estimate; improves after a few answers"
    wanted = shape.layers * shape.top_k
    copy_ms = [wanted * (1 - h) * link.copy_ms(sizes.blob) for h in hit]
    weights_ms = wanted * speeds.expert_ms + sizes.dense / speeds.memory_gbps / 1e6
    least, most = (weights_ms + shape.layers * block for block in speeds.block_ms)
    slow, quick = (1 + SPREAD) * (most + copy_ms[0]), (1 - SPREAD) * max(least, copy_ms[1])
    return Forecast(hit, (1e3 / slow, 1e3 / quick), basis if slots >= total else f"{basis}; copies {where}")


@dataclass(frozen=True, slots=True)
class Played:
    """A configuration on recorded tokens, its first quarter warm-up. `tpot_ms`: None without a clock."""

    hit: float
    tpot_ms: float | None
    basis: str


def replayed(trace: Trace, experts: int, slots: int, settings: Settings, blob: int, seen: Seen) -> Played | None:
    """What the chosen policy and prefetcher would have made of `trace` with `slots` in all; None where these settings
    cannot be used with so few slots, or need a profile that is not there. Of at least four tokens.
    """
    tokens, layers, top_k = trace.shape
    try:
        check_needs(settings, seen.profile)
        config = Config.of(settings, slots, layers, experts, top_k, seen.profile)
        replay = Replay(
            ArrayTrace(trace, experts),
            maker(config),
            [config.capacity],
            config.scope,
            "filled",
            config.hints(layers, experts),
            config.transit,
        )
    except MoestroError:
        return None
    warm = tokens // 4
    replay.feed(_chunk(trace[:warm]))
    before = replay.tally.by_misses.copy()
    requests, missed = replay.feed(_chunk(trace[warm:]))
    hit = 1 - float(missed.sum()) / max(1, int(requests.sum()))
    tpot_ms = seen.clock.tpot_ms((replay.tally.by_misses - before)[0]) if seen.clock is not None else None
    title, prefetch = variant("eviction", config.policy).title, settings.prefetch
    basis = f"{title} on {tokens} recorded tokens of this model"
    if prefetch.predictor.name == "none" or slots >= layers * experts or seen.clock is None:
        return Played(hit, tpot_ms, basis)
    name = variant("predictor", prefetch.predictor.name).title
    ahead = TimedConfig(
        config, *prefetch.predictor, deadline=prefetch.deadline, guard=prefetch.guard, beside=prefetch.beside
    )
    part = ArrayTrace(trace[-max(LEAST_AHEAD, AHEAD // layers) :], experts)
    try:
        found, plain = timed(
            part, [ahead, TimedConfig(config)], seen.clock, blob, profile=seen.profile, start="filled", processes=1
        )
    except MoestroError:  # it looks at hidden states, which a recording does not have
        return Played(hit, tpot_ms, f"{basis}, without prefetching: what {name} adds shows once it has been used")
    if tpot_ms is None or not found.tpot_ms or not plain.tpot_ms:
        return Played(hit, tpot_ms, basis)
    more = (found.hit_rate or 0.0) - (plain.hit_rate or 0.0)
    basis = f"{title} on {tokens} recorded tokens of this model, with what {name} changes on the last {part.tokens}"
    return Played(min(1.0, max(0.0, hit + more)), tpot_ms * found.tpot_ms / plain.tpot_ms, basis)


def _chunk(ids: Trace) -> Chunk:
    """Decoded tokens [n, layers, k], each a pass of its own."""
    return Chunk(ids, np.ones(len(ids), np.int32), np.ones(len(ids), np.bool_), np.zeros(len(ids), np.int32))


_measured: dict[tuple[object, ...], Speeds] = {}


def mean_speeds(codecs: LayerCodecs, hidden: int, top_k: int, fast: bool = False) -> Speeds:
    """As `measure_speeds`, with the time of an expert on average over layers."""
    found = [measure_speeds(codec, hidden, top_k, fast) for codec in codecs]
    return replace(found[0], expert_ms=sum(one.expert_ms for one in found) / len(found))


def measure_speeds(codec: Codec, hidden: int, top_k: int, fast: bool = False) -> Speeds:
    """This device's speeds for experts of one codec; takes a fraction of a second, once per process. A GPU is
    timed with its kernels, `top_k` experts at a time, where they run: the first time they are compiled. `fast`: a CPU
    with the kernels of the fast arithmetic, where it has some."""
    key = codec.name, hidden, codec.slot_bytes, codec.dtype, codec.device, top_k, fast
    if key not in _measured:
        whole = codec if codec.whole is None else codec.whole[0]  # which blocks of it take as long as
        served = fast and codec.device.type == "cpu"
        shapes = [matrix(whole, part) for part in whole.weights] if served and isinstance(whole, Base) else []
        known = shapes and all(serves(one) for one in shapes)
        _measured[key] = _measure_fast(whole, shapes, hidden, top_k) if known else _measure(codec, hidden, top_k)
    return _measured[key]


@torch.inference_mode()
def _measure_fast(codec: Codec, shapes: Sequence[Matrix], hidden: int, top_k: int) -> Speeds:
    """With the canonical products, which read slots and dense weights where they lie."""
    count = min(256, max(top_k, COLD // codec.slot_bytes))
    slots = [torch.zeros(codec.slot_bytes, dtype=torch.uint8) for _ in range(count)]
    products = [(CanonicalProducts(one, torch.float32), torch.zeros(1, one.inputs)) for one in shapes]

    def experts(i: int) -> None:
        some = [slots[(i * top_k + at) % count].data_ptr() for at in range(top_k)]
        for product, x in products:
            product.few(some, x)

    plain = Matrix(4 * hidden, hidden, False, 0, 0, "", Part(0, codec.dtype), None, None, None, None)
    matrices = min(32, max(2, COLD // (4 * hidden * hidden * codec.dtype.itemsize)))
    dense, product = (
        torch.zeros(matrices, 4 * hidden, hidden, dtype=codec.dtype),
        CanonicalProducts(plain, torch.float32),
    )
    x = torch.zeros(1, hidden)
    dense_s = _seconds(lambda i: product.few([dense[i % matrices].data_ptr()], x), codec.device)
    expert_s = _seconds(experts, codec.device) / top_k
    gbps = dense[0].numel() * codec.dtype.itemsize / dense_s / 1e9
    return Speeds(expert_s * 1e3, gbps, FAST_BLOCK_MS)


@torch.inference_mode()
def _measure(codec: Codec, hidden: int, top_k: int) -> Speeds:
    device, dtype = codec.device, codec.dtype
    count = min(256, max(2, COLD // codec.slot_bytes))
    raw = [torch.zeros(codec.slot_bytes, dtype=torch.uint8, device=device) for _ in range(count)]
    slots = [codec.views(one) for one in raw]
    inputs = {part: torch.zeros(1, codec.out_in(part)[1], dtype=dtype, device=device) for part in slots[0].weights}

    def expert(i: int) -> None:
        for part, x in inputs.items():
            codec.linear(slots[i % count], part, x)

    expert_s = _by_kernels(codec, raw, inputs, top_k) if device.type == "cuda" else None

    matrices = min(32, max(2, COLD // (4 * hidden * hidden * dtype.itemsize)))
    dense = torch.zeros(matrices, hidden, 4 * hidden, dtype=dtype, device=device)
    x = torch.zeros(1, hidden, dtype=dtype, device=device)
    dense_s = _seconds(lambda i: torch.mm(x, dense[i % matrices]), device)
    expert_s = _seconds(expert, device) if expert_s is None else expert_s
    return Speeds(expert_s * 1e3, dense[0].numel() * dtype.itemsize / dense_s / 1e9)


def _by_kernels(codec: Codec, slots: list[torch.Tensor], inputs: dict[str, torch.Tensor], top_k: int) -> float | None:
    """Seconds of one expert's products as the GPU's kernels compute them, `top_k` at a time; None where they do not
    run."""
    kernels = make_kernels(codec)
    if kernels is None:
        return None

    def experts(i: int) -> None:
        some = [slots[(i * top_k + at) % len(slots)] for at in range(top_k)]
        for part, x in inputs.items():
            kernels.multiply(part, some, x)

    try:
        return _seconds(experts, codec.device) / top_k
    except Exception:  # of a compiler or driver: the load will find out, and say so
        return None


def _seconds(work: Callable[[int], object], device: torch.device) -> float:
    """Seconds of one call of `work`, repeated for LONGEST_S. On a CPU those of a quick call, with one thread or all,
    whichever is quicker, as the engine chooses: what other programs do just now, and threads that wait for one
    another, would make a first estimate many times too slow, for as long as the process runs."""
    work(0)
    if device.type == "cuda":
        done, begin_s = 0, time.perf_counter()
        while time.perf_counter() - begin_s < LONGEST_S or done < 2:
            done += 1
            work(done)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - begin_s) / done
    most = torch.get_num_threads()
    try:
        return min(_quick(work, threads) for threads in sorted({1, most}))
    finally:
        torch.set_num_threads(most)
        openmp.stop_workers()


def _quick(work: Callable[[int], object], threads: int) -> float:
    """The seconds within which a quarter of the calls end."""
    torch.set_num_threads(threads)
    took, begin_s = list[float](), time.perf_counter()
    while (now_s := time.perf_counter()) - begin_s < LONGEST_S or len(took) < 2:
        work(len(took))
        took.append(time.perf_counter() - now_s)
    return sorted(took)[len(took) // 4]
