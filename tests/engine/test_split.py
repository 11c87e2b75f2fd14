"""The engine with experts in blocks: tops stay, the rest is fetched, prefetches go into the buffer beside the cache."""

import itertools
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.errors import SettingError
from core.importing import import_model
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.registry import variants
from core.settings.sampling import Sampling
from core.types import Asked, Ids, Outcome, StepRecord
from tests.checkpoints import make_checkpoint
from tests.decoded import passes_of
from tests.engine.test_packs import CHAT, logits
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

HALF = {"split": "uniform", "split.uniform.theta": 0.5, "buffer": 4}
TURNS: dict[str, list[object]] = {
    "split": ["whole", "uniform"],
    "split.uniform.theta": [0.0, 0.25, 0.5, 0.75, 1.0],
    "buffer": [0, 4, 5, 7],
    "budget": ["35%", "50%", "75%", "100%"],
    "eviction": [v.name for v in variants("eviction") if not v.needs],
    "predictor": ["none", "gate", "all_next", "random", "previous_token"],
    "prefetch_deadline": [True, False],
    "scope": ["layer", "global"],
    "pins": ["", "0:1, 1:2"],
}


def load(
    path: Path, blocks: int = 2, host: str = "auto", format: str = "checkpoint", dtype: str = "auto", **settings: object
) -> Engine:
    load = {"host": host, "format": format, "dtype": dtype}
    spec = LoadSpec.checked(str(path), Settings(settings), context=256, blocks=blocks, **load)
    return Engine.load(spec)


@pytest.fixture
def engine(model: Path) -> Iterator[Engine]:
    engine = load(model, **HALF, budget="62.5%", eviction="lcp", predictor="gate")
    yield engine
    engine.unload()


def steps_of(engine: Engine, tokens: int = 24, prompt: Asked = CHAT) -> list[StepRecord]:
    return passes_of(engine.generate(prompt, Sampling(temperature=0, max_new_tokens=tokens)))


def test_tops_are_kept_and_the_rest_is_fetched(engine: Engine) -> None:
    cache, blocks = engine.expert_cache, engine.expert_cache.core.blocks
    steps = [step for step in steps_of(engine) if step.phase == "decode"]
    cache.check_integrity()
    assert {len(slots) for slots in cache.core.table} == {0, 1, 2}, "tops, wholes, and experts without slots"
    kept = sum(bool(slots) for slots in cache.core.table)
    assert kept > cache.capacity, "more experts than whole ones would have room"
    tops, outcomes = sum(step.top_hits for step in steps), [o for step in steps for o in step.outcome.tolist()]
    assert 0 < tops <= sum(o in (Outcome.MISS, Outcome.PARTIAL_HIT) for o in outcomes)
    whole, copied = engine.sizes.blob, [copy for step in steps for copy in step.transfers]
    assert {copy.bytes for copy in copied} == {whole, whole // blocks}, "whole experts, and bottoms alone"
    requests = sum(len(step.outcome) for step in steps)
    assert requests == len(steps) * engine.shape.layers * engine.shape.top_k, "one outcome for each expert"


@pytest.mark.long(0.1)
def test_a_prompt_leaves_as_many_tops_as_there_were() -> None:
    """One that uses more experts than are cached whole is computed in the slots of the buffer and of whole experts."""
    engine = load(Path("demo"), **HALF, budget="50%", eviction="lcp")
    cache, shape = engine.expert_cache, engine.shape

    def tops() -> list[int]:
        return np.array([bool(slots) for slots in cache.core.table]).reshape(shape.layers, -1).sum(1).tolist()

    before = [cache.pool(layer).capacity for layer in range(shape.layers)]
    assert tops() == before, "a slot for the top of an expert, which is one block"
    for length in (51, 90):
        (step,) = steps_of(engine, 1, Ids([7 * at for at in range(length)]))
        assert step.phase == "prefill" and np.bincount(step.layer).min() > max(before) // cache.core.blocks
        assert tops() == before
        cache.check_integrity()
    engine.unload()


def test_without_blocks_no_part_can_stay(model: Path) -> None:
    with pytest.raises(SettingError, match="loaded with whole experts"):
        load(model, blocks=1, **HALF)
    whole = load(model, blocks=1)
    with pytest.raises(SettingError, match="--blocks"):
        whole.change(HALF)
    assert whole.settings["split"] == "whole"
    whole.unload()
    with pytest.raises(SettingError, match=r"cannot be cut into 5 equal blocks.*Possible numbers of blocks: 1, 2"):
        load(model, blocks=5)


def test_a_buffer_that_is_too_small_or_too_large_is_refused(engine: Engine) -> None:
    before = engine.settings
    with pytest.raises(SettingError, match="too small: a token uses 4"):
        engine.change({"buffer": 1})
    with pytest.raises(SettingError, match="buffer of 500 experts is larger than the budget"):
        engine.change({"buffer": 500})
    assert engine.settings == before
    with pytest.raises(SettingError, match="needs a profile"):
        engine.change({"split": "moepic"})


@pytest.mark.long(0.1)
@pytest.mark.parametrize("format", ["checkpoint", "int4-g32"])
def test_settings_turned_at_random_change_no_token_and_break_nothing(model: Path, format: str) -> None:
    """What is generated depends on the weights alone, and each layer keeps no more blocks than its slots."""
    dice = random.Random(7)
    engine = load(model, format=format, budget="100%", split="uniform")
    prompt, sampling = "Hello there, you", Sampling(temperature=0, max_new_tokens=60)
    wanted = [piece.token for piece in engine.generate(prompt, sampling) if piece.kind == "token"]
    for _ in range(2):
        tokens = []
        for piece in engine.generate(prompt, sampling):
            if piece.kind != "token":
                continue
            tokens.append(piece.token)
            engine.expert_cache.check_integrity()  # no pool has more blocks than slots, at any token
            name = dice.choice(list(TURNS))
            with suppress(SettingError):  # such as a buffer that the budget has no room for: changes nothing
                engine.change({name: dice.choice(TURNS[name])})
        engine.expert_cache.check_integrity()
        assert tokens == wanted
    engine.unload()


@pytest.mark.long(0.1)
@pytest.mark.parametrize("host", layered(["none", "200kB", "all"], quick=lambda host: host == "200kB"))
def test_packs_in_blocks_and_whole_ones_give_the_same_bits(model: Path, tmp_path: Path, host: str) -> None:
    cut, whole = import_model(str(model), tmp_path / "cut", blocks=2), import_model(str(model), tmp_path / "whole")
    plain = load(model, budget="100%", split="uniform")
    wanted = logits(plain)
    plain.unload()
    for pack in (cut, whole):
        engine = load(pack, host=host, budget="62.5%", predictor="gate", **HALF)
        assert torch.equal(logits(engine), wanted)
        engine.expert_cache.check_integrity()
        engine.unload()
    joined = load(cut, blocks=1, host=host, budget="50%")
    exact = load(model, blocks=1, budget="100%")
    assert torch.equal(logits(joined), logits(exact)), "a pack in blocks holds whole experts, too"
    joined.unload()
    exact.unload()


@pytest.mark.long(0.1)
@pytest.mark.parametrize(
    ("format", "dtype"),
    layered(
        itertools.product(("checkpoint", "int8", "int4-g32", "mxfp4"), ("float32", "bfloat16")),
        quick=lambda case: case == ("checkpoint", "bfloat16"),
    ),
)
def test_whole_experts_have_the_bits_of_one_block(model: Path, format: str, dtype: str) -> None:
    """Theta = 1: blocks are computed side by side; and so are prompts, however experts are split."""
    exact = load(model, blocks=1, format=format, dtype=dtype, budget="100%")
    engine = load(model, format=format, dtype=dtype, budget="50%", predictor="gate")
    wanted = logits(exact)
    assert torch.equal(logits(engine), wanted)
    engine.change(HALF)
    assert not engine.expert_cache.keeps_whole
    assert torch.equal(logits(engine)[:8], wanted[:8])
    for one in (engine, exact):
        one.unload()


@pytest.mark.long(0.1)
def test_a_part_is_read_from_disk_alone(tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "wide", moe_intermediate_size=256, hidden_size=128))
    pack = import_model(str(path), tmp_path / "cut", blocks=4)
    engine = load(pack, blocks=4, host="none", budget="62.5%", **HALF)
    steps_of(engine)  # each expert is read as a whole at first, to be verified
    reader = engine.loaded.store._reader  # type: ignore[attr-defined]
    steps = [step for step in steps_of(engine) if step.phase == "decode"]
    copies = [copy for step in steps for copy in step.transfers]
    assert any(copy.bytes < engine.sizes.blob for copy in copies)
    assert 0 < sum(step.disk_bytes for step in steps) < len(copies) * reader.padded_bytes
    engine.unload()


@pytest.mark.long(0.1)
def test_measuring_gives_the_cache_back(engine: Engine) -> None:
    """As it was, but that bottoms which had room may be gone; and every slot holds its own block."""
    steps_of(engine)
    cache = engine.expert_cache
    before = {eid: len(slots) for eid, slots in enumerate(cache.core.table) if slots}
    with engine.workbench("a test") as bench:
        while not cache.quiet():  # prefetches of the last token
            pass
        with bench.borrowed_cache(lambda: False):
            for at in range(4):
                bench.run([5 + at, 6, 7, 8], engine.wiring.kv.fresh())
        bench.close()
    cache.check_integrity()
    after = {eid: len(slots) for eid, slots in enumerate(cache.core.table) if slots}
    assert after.keys() == before.keys()
    size, fetch = engine.loaded.plan.codecs[0].block_bytes, engine.loaded.store.fetch
    for eid, slots in enumerate(cache.core.table):
        for at, slot in enumerate(slots):
            held = slot.raw[:size].clone()
            fetch(eid, [slot.raw], at)
            assert torch.equal(held, slot.raw[:size]), f"the slot of block {at} of {eid} holds another"
