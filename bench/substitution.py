"""bench substitution: what does choosing substitutes cost per layer?

A layer of 128 experts, 8 active, half of them resident, with random router logits and a random profile: only the time
counts here. `plain.pick` chooses for one token, as in decoding, `batch.select` for many at once, as in prefill. No gate
closes and every missing expert may be replaced: the most work possible.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from core.policy.substitute import Ask, Gates, Substitute, batch, plain
from core.session.manifest import device_name, versions
from core.settings.registry import create, variants

EXPERTS, TOP_K, PROMPT = 128, 8, 512
LAYERS = 2
OPEN = Gates(rho=TOP_K)
CPU = torch.device("cpu")


@dataclass
class Drawn:
    """A random profile with the parts that substitutes need."""

    pairs: npt.NDArray[np.float32]
    pairs_weighted: npt.NDArray[np.float32]
    likeness: npt.NDArray[np.float16]


def run(rounds: int = 200, small: bool = False, say: Callable[[str], None] = print) -> dict[str, object]:
    """Measures; returns the result as plain data. `rounds` = calls per median."""
    rounds, found = (3 if small else rounds), dict[str, Any]()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more do not help at these sizes
    try:
        for device in (CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])):
            for choice in variants("substitute"):
                say(f"{choice.name} on {device.type}")
                found.setdefault(device.type, {})[choice.name] = _cost(choice.name, device, rounds)
    finally:
        torch.set_num_threads(threads)
    return {
        "experts": EXPERTS,
        "top_k": TOP_K,
        "prompt": PROMPT,
        "rounds": rounds,
        "us": found,
        "device": {name: device_name(torch.device(name)) for name in found},
        "versions": versions(),
    }


def _cost(name: str, device: torch.device, rounds: int) -> dict[str, float]:
    """Microseconds per layer: one token (half missing / nothing missing), and a prompt (the same)."""
    substitute: Substitute = create("substitute", name, {})
    substitute.prepare(_profile(), LAYERS, EXPERTS, device)
    one, many = question(1, device), question(PROMPT, device)
    found = {}
    for end, now, prompt in (("", one, many), ("_resident", there(one), there(many))):
        found["token" + end] = _median_us(_token(substitute, now), device, rounds)
        found["prompt" + end] = _median_us(partial(batch.select, prompt, OPEN, substitute), device, rounds // 4 or 1)
    return found


def _token(substitute: Substitute, ask: Ask) -> Callable[[], object]:
    """The choice for one token whose routing is already on the host, as in the engine."""
    if substitute.reroutes:
        return lambda: plain.select(ask, OPEN, substitute)
    ids, weights = ask.ids[0].tolist(), ask.weights[0].tolist()
    missing, ready = ask.missing.tolist(), ask.ready.tolist()
    return lambda: plain.pick(
        ids, weights, missing, ready, OPEN, lambda at, expert: substitute.listed(ask, 0, at, expert)
    )


def there(ask: Ask) -> Ask:
    """The same request with everything resident."""
    return replace(ask, missing=torch.zeros_like(ask.missing), ready=torch.ones_like(ask.ready))


def question(tokens: int, device: torch.device) -> Ask:
    """A request of `tokens` tokens; of one, every second expert is missing, of many about half."""
    draw = torch.Generator().manual_seed(tokens)
    logits = torch.randn(tokens, EXPERTS, generator=draw)
    weights, ids = logits.softmax(-1).topk(TOP_K)
    missing = torch.rand(EXPERTS, generator=draw) < 0.5
    if tokens == 1:
        missing[ids[0]] = torch.arange(TOP_K) % 2 == 0
    named = torch.rand(EXPERTS, generator=draw)
    return Ask(
        1,
        ids.to(device),
        weights.to(device),
        missing.to(device),
        ~missing.to(device),
        logits.to(device),
        named.to(device),
    )


def _profile() -> Drawn:
    rng = np.random.default_rng(0)
    shape = (LAYERS, EXPERTS, EXPERTS)
    return Drawn(rng.random(shape, np.float32), rng.random(shape, np.float32), rng.random(shape).astype(np.float16))


def _median_us(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):  # the first is warm-up
        if device.type == "cuda":
            torch.cuda.synchronize()
        began_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append((time.perf_counter() - began_s) * 1e6)
    return round(statistics.median(taken[1:]), 2)


def table(result: dict[str, object]) -> str:
    """The result as text."""
    r: Any = result
    lines = [
        f"Microseconds a layer of {r['experts']} experts, {r['top_k']} active (medians of {r['rounds']} calls, a "
        "quarter for prompts); half of the experts missing / none:"
    ]
    for device, found in r["us"].items():
        lines.append(f"  {device}: {r['device'][device]}")
        lines.append(f"    {'substitute':16s} {'one token':>20s} {r['prompt']:>15} tokens")
        for name, us in found.items():
            lines.append(
                f"    {name:16s} {us['token']:11.1f} / {us['token_resident']:6.1f} "
                f"{us['prompt']:13.1f} / {us['prompt_resident']:6.1f}"
            )
    return "\n".join(lines)
