"""How often the computing thread waits for the GPU in a decoded token, by mode: once a layer for the router's choice,
once at the end of the pass, once for the drawn token, and what is stated here beside that."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.engine.sampler import drawn
from core.memory.to_device import to_device
from core.policy.substitute.entropy import TEMPERATURES
from core.settings.config import Settings
from core.settings.sampling import Sampling
from tests.cuda.conftest import engine_on
from tests.engine.profiles import drawn_profile
from tests.fake_cuda import FakeCuda, installed
from tests.selection import layered

GPU = torch.device("cuda")
PROMPT = "hello there, how are you?"
WARM, TOKENS = 3, 12  # tokens that are not looked at, and all
GREEDY = Sampling(temperature=0.0, max_new_tokens=TOKENS)
BASE: Mapping[str, object] = {"budget": "45%", "eviction": "lru"}
Case = tuple[Mapping[str, object], int, int]
"""Settings, and how often may be waited: in each layer, and beside that."""
PENALISED = Sampling(
    temperature=0.8,
    top_k=20,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    seed=1,
    max_new_tokens=TOKENS,
)


def waits_of(engine: Engine, fake: FakeCuda, sampling: Sampling = GREEDY) -> list[Counter[str]]:
    """Of each decoded token, after some: where this thread waited, and how often."""
    found, me = list[Counter[str]](), threading.get_ident()
    with fake.noting_waits() as waits:
        for piece in engine.generate(PROMPT, sampling):
            if piece.kind == "token":
                found.append(Counter(f"{one.call} in {one.place}" for one in waits if one.thread == me))
            waits.clear()
    assert len(found) > WARM + 4
    return found[WARM:]


def most(found: list[Counter[str]]) -> Counter[str]:
    return max(found, key=Counter.total)


EXACT: tuple[Case, ...] = (
    ({"budget": "all"}, 1, 2),
    ({"eviction": "lru"}, 1, 2),
    ({"predictor": "previous_token"}, 1, 2),
    ({"predictor": "gate"}, 2, 1),  # each layer's but the last asks the next one's router
)
# beside: the entropies of the gates, and once in a while a row of logits that has arrived long ago
LOSSY: tuple[Case, ...] = (
    ({"miss": "drop", "rho": 64}, 2, 4),  # where something is missing, the weights are read
    ({"miss": "substitute", "substitute": "buddy", "rho": 64}, 2, 4),
    ({"miss": "substitute", "substitute": "similar", "rho": 64}, 2, 4),
    ({"miss": "substitute", "substitute": "random", "rho": 64}, 2, 4),
    ({"miss": "substitute", "substitute": "router_ranked", "rho": 64}, 3, 4),  # and the router's logits
    ({"miss": "substitute", "substitute": "predicted", "predictor": "gate", "rho": 64}, 4, 2),  # and what was named
    ({"execute": "always", "predictor": "gate"}, 3, 3),  # and how many weights were not the router's own
    ({"execute": "verify", "execute_share": 0.5, "predictor": "gate"}, 3, 2),
)


@pytest.fixture(scope="module")
def loaded(model: Path) -> Iterator[tuple[Engine, FakeCuda]]:
    """An engine for all modes, with a profile."""
    with installed(FakeCuda()) as fake, engine_on(model, BASE) as engine:
        engine.use_profile(profile_of(engine))
        yield engine, fake


@pytest.mark.parametrize(
    ("settings", "a_layer", "beside"),
    layered(EXACT + LOSSY, quick=lambda case: case in (EXACT[-1], LOSSY[-1])),
    ids=["-".join(map(str, one[0].values())) for one in EXACT + LOSSY],
)
def test_waits_of_a_decoded_token(
    loaded: tuple[Engine, FakeCuda], settings: Mapping[str, object], a_layer: int, beside: int
) -> None:
    engine, fake = loaded
    engine.change({**Settings(), **BASE, **settings})
    found, allowed = waits_of(engine, fake), a_layer * engine.shape.layers + beside
    print(f"{allowed} allowed, {most(found).total()} found: {dict(most(found))}")
    assert most(found).total() <= allowed
    assert found[0]["tolist in runtime/moe_step.py:__call__"] == engine.shape.layers, "the fake counts what it should"
    sent = [place for one in found for place in one if place.startswith(("tensor ", "to ", "copy_ ", "as_tensor "))]
    assert not sent, f"sent while the computing thread waits: {sent}"


def profile_of(engine: Engine) -> object:
    random, shape = np.random.default_rng(3), engine.shape
    square = (shape.layers, shape.experts, shape.experts)
    pairs = random.integers(1, 40, square).astype(np.float32)
    tae = np.sort(random.random((shape.layers, 101)).astype(np.float32), 1)
    return replace(
        drawn_profile(engine),
        pairs=pairs + pairs.transpose(0, 2, 1),
        likeness=random.random(square).astype(np.float16),
        norms=random.random(square[:2]).astype(np.float32),
        tae=tae,
        tae_tempered=np.stack([tae] * len(TEMPERATURES), 1),
    )


def test_drawing_a_token_waits_once_whatever_shapes_the_probabilities(loaded: tuple[Engine, FakeCuda]) -> None:
    engine, fake = loaded
    engine.change({**Settings(), **BASE})
    for sampling, more in ((PENALISED, 0), (replace(GREEDY, logprobs=5), 1)):
        found = waits_of(engine, fake, sampling)
        assert most(found).total() <= engine.shape.layers + 2 + more, dict(most(found))


@pytest.mark.long(0.1)
def test_several_answers_wait_as_often_as_one_and_once_for_each_token(fake_cuda: FakeCuda, model: Path) -> None:
    from core.engine.batch_request import BatchRequest

    me = threading.get_ident()
    with engine_on(model, {"budget": "all"}, sequences=3) as engine:
        requests = [BatchRequest(n, PROMPT + " " * n, GREEDY) for n in range(3)]
        with fake_cuda.noting_waits() as waits:
            passes = list[Counter[str]]()
            for piece in engine.generate_many(requests, 3):
                mine = [one for one in waits if one.thread == me]
                if piece.piece is not None and piece.piece.kind == "token" and mine:
                    passes.append(Counter(f"{one.call} in {one.place}" for one in mine))
                    waits.clear()
        layers = engine.shape.layers
    assert len(passes) > 6
    usual = sorted(passes, key=Counter.total)[len(passes) // 2]
    assert usual.total() <= layers + 1 + 3, usual


@pytest.mark.long(0.1)
def test_torch_is_asked_for_its_memory_once_in_many_tokens(
    fake_cuda: FakeCuda, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from core.capacity import memory_accounting
    from core.capacity.memory_accounting import EVERY

    asked, real = [0], memory_accounting._most_reserved

    def counted(device: torch.device) -> int:
        asked[0] += 1
        return real(device)

    with engine_on(model, {"budget": "45%"}) as engine:
        monkeypatch.setattr(memory_accounting, "_most_reserved", counted)
        passes = sum(piece.kind == "token" for piece in engine.generate(PROMPT, replace(GREEDY, max_new_tokens=40)))
        assert asked[0] <= 3 + passes // EVERY, "the prompt, every so many tokens, and the answer's statistics"
        before = asked[0]
        used = engine.memory().used
        assert asked[0] == before + 1 and used >= fake_cuda.memory.reserved, "who looks is told what is so now"


@pytest.mark.long(0.1)
def test_a_peak_between_two_questions_is_found_by_the_next(fake_cuda: FakeCuda, model: Path) -> None:
    from core.capacity.memory_accounting import EVERY

    with engine_on(model, {"budget": "45%"}) as engine:
        pieces = engine.generate(PROMPT, replace(GREEDY, max_new_tokens=4 * EVERY))
        steps = [next(piece for piece in pieces if piece.kind == "token").step for _ in range(3)]
        spike = torch.empty(engine.memory().budget, dtype=torch.uint8, device="cuda")
        del spike
        steps += [piece.step for piece in pieces if piece.step is not None]
    over = [at for at, step in enumerate(steps) if step is not None and step.device_bytes > step.budget_bytes]
    assert over and over[-1] - over[0] <= EVERY and over[-1] < len(steps) - EVERY, "seen, and given back"


@pytest.mark.parametrize("seed", range(8))
def test_a_seed_draws_the_token_that_torch_draws(fake_cuda: FakeCuda, seed: int) -> None:
    """On the emulated GPU both use the same generator."""
    probs = torch.randn(1, 1000, generator=torch.Generator().manual_seed(seed)).mul(3).softmax(-1)
    want = int(torch.multinomial(probs, 1, generator=torch.Generator().manual_seed(seed)))
    assert drawn(to_device(probs, GPU), torch.Generator().manual_seed(seed)) == want
    with pytest.raises(RuntimeError, match="no numbers"):
        drawn(to_device(probs * float("nan"), GPU), torch.Generator())


def test_the_fake_counts_what_waits_and_nothing_else(fake_cuda: FakeCuda) -> None:
    x, at = torch.arange(4.0, device="cuda"), torch.tensor([1, 2], device="cuda")
    row = torch.zeros(2, pin_memory=True)
    waits_for = {
        "tensor": lambda: torch.tensor([1.0], device="cuda"),
        "to": lambda: torch.zeros(2).to("cuda"),
        "to ": lambda: torch.zeros(2).to("cuda", non_blocking=True),  # not pinned
        "copy_": lambda: torch.empty(2, device="cuda").copy_(torch.zeros(2)),
        "cpu": x.cpu,
        "item": lambda: x[0].item(),
        "__bool__": lambda: bool(x[0] > 1),
        "__getitem__": lambda: x[x > 1],
        "__getitem__ ": lambda: x[[0, 1]],
        "nonzero": x.nonzero,
        "where": lambda: torch.where(x > 1),
        "bincount": lambda: torch.bincount(at),
        "repeat_interleave": lambda: torch.repeat_interleave(at),
        "multinomial": lambda: torch.multinomial(x, 1),
    }
    for call, made in waits_for.items():
        with fake_cuda.noting_waits() as waits:
            made()
        assert waits and {one.call for one in waits} == {call.strip()}, (call, waits)
    with fake_cuda.noting_waits() as waits:
        row.to("cuda", non_blocking=True)
        row.copy_(x[:2], non_blocking=True)
        x[at] = 0.0
        x[x > 1] = 2.0
        torch.where(x > 1, x, 0.0)
        torch.zeros(3, device="cuda").scatter_(0, at, 1.0)
        torch.repeat_interleave(at, 3)
        x.topk(2), x.softmax(-1), x[at], x[1:3], x[0]
        torch.arange(3, device="cuda"), torch.full((2,), 1.0, device="cuda")
    assert not waits
