"""Checks of `launch.py accept` on parts of a model that are not experts: attention, norms and rotary embeddings."""

import statistics
import time
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, apply_rotary_pos_emb

from bench.accept.drawn import Subject
from bench.accept.link import Wrong, milliseconds
from core.hf.attention_launch import Shape
from core.hf.attention_launch import tried as attention_for
from core.hf.fused_rmsnorm import DEVICE, FORMS, fuse, kind_of, units_off
from core.hf.rotary import Rotation, tried

GROUPED = (256, 1024, 4096, 8192)  # positions at which grouped queries are timed
LENGTHS = 48  # that the KV of a text grows by
FROM = 1000  # tokens that it has before
ANEW = 3.0  # so many times as long for a length that is new as for one that was seen: it is planned anew


def attention(subject: Subject) -> dict[str, Any]:
    """A decoded token's attention over a KV that is longer by one each time: microseconds at lengths that are new, and
    at the same ones again, with cuDNN's kernels and with the others. Which of them torch takes by itself."""
    lengths, found = LENGTHS if not subject.small else 6, dict[str, Any]()
    found["torch_takes"] = chosen(subject)
    for name, cudnn in (("cudnn", True), ("others", False)):
        try:
            with allowed(cudnn=cudnn):
                new, again = (_at_each_length(subject, lengths) for _ in range(2))
        except RuntimeError as error:  # no such kernel for this GPU, these shapes or this torch
            found[name] = {"left_out": str(error).partition("\n")[0]}
            continue
        found[name] = {"new_us": 1e6 * statistics.median(new), "again_us": 1e6 * statistics.median(again)}
        found[f"{name}_plans_anew"] = found[name]["new_us"] > ANEW * found[name]["again_us"]
    return found | {"grouped_us": grouped(subject)}


def grouped(subject: Subject) -> dict[str, Any]:
    """Device microseconds of a decoded token's attention whose query heads share keys and values, by positions: by
    torch as they are shared, repeated, and under a mask as a graph of fixed positions would need; and by the kernels of
    core.hf.attention_launch."""
    sizes, found = subject.sizes, dict[str, Any]()
    times, width = sizes.heads // sizes.kv_heads, sizes.head_dim or sizes.hidden // sizes.heads
    own = attention_for(Shape(sizes.heads, sizes.kv_heads, width, width, torch.bfloat16, width**-0.5), subject.device)
    for length in GROUPED[:1] if subject.small else GROUPED:
        q, k, v = _states(subject, length)
        k, v = k[:, : sizes.kv_heads].contiguous(), v[:, : sizes.kv_heads].contiguous()
        mask = torch.ones(1, 1, 1, length, dtype=torch.bool, device=subject.device)
        shared = partial(scaled_dot_product_attention, enable_gqa=True)
        ways: dict[str, Callable[[], object]] = {
            "shared": partial(shared, q, k, v),
            "repeated": partial(_repeated, q, k, v, times),
            "masked": partial(shared, q, k, v, mask),
        }
        if own is not None:
            ways["own"] = partial(own, q, k, v, torch.tensor([length - 1], device=subject.device))
        for name, way in ways.items():
            try:
                found[f"{name}_{length}"] = round(in_a_graph_us(way), 1)
            except RuntimeError as error:
                found[f"{name}_{length}"] = str(error).partition("\n")[0]
    return found


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, times: int) -> torch.Tensor:
    return scaled_dot_product_attention(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def in_a_graph_us(call: Callable[[], object], times: int = 20) -> float:
    """Device time of a call, without the host's for its launches."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(times):
            call()
    return 1e3 * milliseconds(graph.replay, 5, 2) / times


def chosen(subject: Subject) -> str:
    """The kernel that torch takes for a decoded token's attention, in its words."""
    backend = torch._fused_sdp_choice(*_states(subject, FROM))
    return str(torch.nn.attention.SDPBackend(backend)).rpartition(".")[2]


@contextmanager
def allowed(*, cudnn: bool) -> Any:
    """Inside, attention is computed by cuDNN alone, or by anything else."""
    backends = torch.backends.cuda
    before = backends.cudnn_sdp_enabled(), backends.flash_sdp_enabled(), backends.mem_efficient_sdp_enabled()
    math = backends.math_sdp_enabled()
    backends.enable_cudnn_sdp(cudnn)
    for enable in (backends.enable_flash_sdp, backends.enable_mem_efficient_sdp, backends.enable_math_sdp):
        enable(not cudnn)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(before[0])
        backends.enable_flash_sdp(before[1])
        backends.enable_mem_efficient_sdp(before[2])
        backends.enable_math_sdp(math)


def _states(subject: Subject, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes, device = subject.sizes, subject.device
    heads, of = sizes.heads, sizes.head_dim or sizes.hidden // sizes.heads
    q = torch.randn(1, heads, 1, of, device=device, dtype=torch.bfloat16)
    k, v = (torch.randn(1, heads, length, of, device=device, dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


def _at_each_length(subject: Subject, lengths: int) -> list[float]:
    """Seconds until the result is there, at each of the next lengths."""
    q, k, v = _states(subject, FROM + lengths)
    stream, found = torch.cuda.current_stream(subject.device), list[float]()
    stream.synchronize()
    for length in range(FROM, FROM + lengths):
        began_s = time.perf_counter()
        scaled_dot_product_attention(q, k[:, :, :length], v[:, :, :length])
        stream.synchronize()
        found.append(time.perf_counter() - began_s)
    return found


def norms(subject: Subject) -> dict[str, Any]:
    """A token's RMS norm: by how many units of bfloat16 torch's own kernels differ from the model's code at most, which
    of them the engine takes, and the host's microseconds for each."""
    width, device = subject.sizes.hidden, subject.device
    module = Qwen3MoeRMSNorm(width).to(device, torch.bfloat16)
    module.weight.data.normal_(1.0, 0.2)
    kind = kind_of(module)
    if kind is None:
        raise Wrong(f"a norm on {device} is not taken for one; it would be on {DEVICE}")
    x, rounds = torch.randn(1, 1, width, device=device, dtype=torch.bfloat16), 20 if subject.small else 2000
    with torch.inference_mode():
        found: dict[str, Any] = {"own_us": _host_us(lambda: module(x), rounds)}
        for form in FORMS:
            found[f"{form.__name__}_us"] = _host_us(lambda form=form: form(x, module.weight, kind.epsilon), rounds)  # type: ignore[misc]
            found[f"{form.__name__}_units_off"] = units_off(module, kind, form)
    replaced = fuse(torch.nn.ModuleList([module]))
    found["taken"] = vars(module)["forward"].func.__name__ if replaced else "the model's own"
    return found


def rotation(subject: Subject) -> dict[str, Any]:
    """A token's rotary embedding: whether the kernel has the bits of the model's own code, so that the engine takes it,
    and the host's microseconds for each."""
    q, k, _ = _states(subject, 1)
    k, rounds = k[:, : subject.sizes.kv_heads], 20 if subject.small else 2000
    cos, sin = (torch.randn(1, 1, q.shape[-1], device=q.device, dtype=q.dtype) for _ in range(2))
    with torch.inference_mode():
        found: dict[str, Any] = {"own_us": _host_us(lambda: apply_rotary_pos_emb(q, k, cos, sin), rounds)}
        found["exact"] = "one kernel" if tried(apply_rotary_pos_emb, (q, k), (cos, sin)) else "the model's own"
        rotate = Rotation(apply_rotary_pos_emb)
        found["engine_us"] = _host_us(lambda: rotate(q, k, cos, sin), rounds)
    return found


def _host_us(call: Callable[[], object], rounds: int) -> float:
    """Of this thread, which launches and does not wait."""
    spans = []
    for _ in range(5):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for _ in range(rounds // 5):
            call()
        spans.append((time.perf_counter() - began_s) / (rounds // 5))
    torch.cuda.synchronize()
    return 1e6 * statistics.median(spans)
