"""Long prompts borrow memory from the slots where that copies fewer bytes, and give it back; the budget holds."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.capacity import sizes
from core.capacity.pieces import COMES_BACK, borrowed_slots, piece
from core.capacity.plan import plan
from core.capacity.sizes import PromptPiece, Sizes
from core.engine import Engine
from core.engine.batch_request import BatchRequest
from core.engine.settings_controller import SettingsController
from core.settings.config import Settings
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from core.types import ModelShape, Piece
from tests.checkpoints import make_checkpoint
from tests.loaded import loaded
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

LONG = "".join(chr(97 + n * n % 26) for n in range(1400))
ONE = Sampling(max_new_tokens=3, temperature=0.0)
SHAPE = ModelShape(4, 16, 2, 64, 1000, 0)
extras = st.lists(st.integers(0, 20_000), max_size=4).map(sorted)


def sized(chunk: int, extra: list[int]) -> Sizes:
    longer = tuple(PromptPiece(chunk << n, bytes_) for n, bytes_ in enumerate(extra, 1))
    return Sizes(SHAPE, 0, 0, 0, 1000, 1000, chunk, longer=longer)


@given(st.integers(1, 512), extras, st.integers(0, 64), st.integers(1, 20_000), st.integers(0, 64))
def test_no_other_pieces_copy_fewer_bytes(chunk: int, extra: list[int], slots: int, unread: int, least: int) -> None:
    some = sized(chunk, extra)
    chosen = piece(some, slots, unread, lambda left: left >= least)

    def copied(one: PromptPiece) -> int:
        """Missing experts are fetched by every pass; those that made room leave and come back."""
        total, at = COMES_BACK * borrowed_slots(some, one), 0
        while at < unread:
            total += max(0, 64 - (slots - borrowed_slots(some, one)))
            at += one.chunk
        return total

    usual = PromptPiece(chunk, 0)
    allowed = [usual, *(one for one in some.longer if slots - borrowed_slots(some, one) >= least)]
    assert chosen in allowed and copied(chosen) == min(map(copied, allowed))
    assert chosen == usual or copied(chosen) < copied(usual)
    if slots >= 64:
        assert chosen == usual, "with everything resident nothing is copied"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    checkpoint = make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("long"), max_position_embeddings=2048)
    return save_tokenizer(checkpoint)


@pytest.fixture
def engine(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """The activations of this model take more than its experts: here they are reckoned to take little."""
    reckoned = sizes._workspace
    monkeypatch.setattr(sizes, "_workspace", lambda *args: (1 << 20) + reckoned(*args) // 200)
    monkeypatch.setattr(sizes, "WORTH_SHARED", 0.0)
    settings = Settings({"budget": "75%", "predictor": "none", "eviction": "lru"})
    with loaded(path, settings, context=1500, sequences=2) as engine:
        yield engine


def prefills(pieces: list[Piece]) -> list[Piece]:
    return [one for one in pieces if one.kind == "prefill" and one.step is not None]


def test_a_long_prompt_is_one_pass_and_gives_the_memory_back(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine.sizes.chunk == sizes.SHORT_CHUNK and engine.sizes.longer
    slots, cache = engine.expert_cache.slots, engine.expert_cache
    pieces = list(engine.generate(LONG, ONE))
    [read] = [one.step for one in prefills(pieces)]
    assert read is not None and read.tokens > 1300 and read.slots < slots
    later = [one.step for one in pieces if one.kind == "token" and one.step is not None and one.step.phase == "decode"]
    assert later and all(one.slots == slots == cache.slots for one in later)
    assert all(one.device_bytes <= one.budget_bytes for one in (read, *later)), "the budget is a promise"
    assert engine.memory().workspace == engine.sizes.workspace
    cache.check_integrity()
    monkeypatch.setattr(SettingsController, "max_prefill_chunk", lambda *_: 0)
    short = [one.step for one in prefills(list(engine.generate(LONG, ONE)))]
    assert len(short) == 3 and all(one is not None and one.slots == slots for one in short)
    assert read.demand_bytes < sum(one.demand_bytes for one in short if one is not None)


def test_what_was_borrowed_changes_no_bit(engine: Engine, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One piece is one pass, as of a model whose experts are all resident."""
    tokens = [one.token for one in engine.generate(LONG, ONE) if one.kind == "token"]
    with loaded(path, {"budget": "all"}, context=1500) as whole:
        monkeypatch.setattr(whole._generation._passes, "max_chunk", lambda unread: unread)
        assert [one.token for one in whole.generate(LONG, ONE) if one.kind == "token"] == tokens


def test_a_prompt_that_is_stopped_gives_the_memory_back(engine: Engine) -> None:
    stop, slots = threading.Event(), engine.expert_cache.slots
    seen: list[int] = []

    def reading(part: Piece) -> None:
        seen.append(engine.expert_cache.slots)
        stop.set()

    list(engine.generate(LONG, ONE, cancel=stop, reading=reading))
    assert seen and seen[0] < slots == engine.expert_cache.slots
    engine.expert_cache.check_integrity()


@pytest.mark.long(0.1)
def test_a_budget_that_moves_meanwhile_holds(engine: Engine) -> None:
    whole = engine.sizes.slots_all
    begun = False
    for one in engine.generate(LONG, ONE):
        if not begun:
            engine.change({"budget": "90%"})
            begun = True
        if one.step is not None and begun:
            assert one.step.device_bytes <= one.step.budget_bytes
    assert engine.expert_cache.slots == int(whole * 0.9)
    engine.change({"budget": "75%"})
    steps = [one.step for one in engine.generate(LONG, ONE) if one.step is not None]
    assert all(one.device_bytes <= one.budget_bytes for one in steps)
    assert engine.expert_cache.slots == whole * 3 // 4


@pytest.mark.parametrize("together", layered([False, True], quick=lambda together: together))
def test_a_budget_lowered_before_a_pass_holds(engine: Engine, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    passes, least = engine._generation._passes, engine.sizes.slots_min("layer")
    choose = passes.max_chunk

    def piece(unread: int) -> int:
        chosen = choose(unread)
        engine.change({"budget": str(engine.sizes.bytes(least))})
        return chosen

    monkeypatch.setattr(passes, "max_chunk", piece)
    steps = {}
    if together:
        texts = [LONG[:700], LONG[1:800], LONG[2:90]]
        for answer in engine.generate_many([BatchRequest(n, text, ONE) for n, text in enumerate(texts)], 2):
            assert not answer.error
            if answer.piece is not None and answer.piece.step is not None:
                steps[answer.piece.step.index] = answer.piece.step
    else:
        steps = {one.step.index: one.step for one in engine.generate(LONG, ONE) if one.step is not None}
    read = [one for one in steps.values() if one.phase == "prefill"]
    assert len(read) > 1 and max(one.tokens for one in read) <= engine.sizes.chunk
    assert all(one.device_bytes <= one.budget_bytes for one in steps.values())
    assert engine.expert_cache.slots == least and engine.memory().workspace == engine.sizes.workspace


@pytest.mark.long(0.1)
def test_a_budget_lowered_between_two_long_pieces_holds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, least, seen = engine._generation._passes, engine.sizes.slots_min("layer"), list[int]()
    monkeypatch.setattr(passes, "max_chunk", lambda unread: 700)
    for one in engine.generate(LONG, ONE):
        if one.step is not None and one.step.phase == "prefill":
            seen.append(one.step.tokens)
            engine.change({"budget": str(engine.sizes.bytes(least))})
        assert one.step is None or one.step.device_bytes <= one.step.budget_bytes
    assert seen[0] == 700 and max(seen[1:]) <= engine.sizes.chunk and engine.expert_cache.slots == least


@pytest.mark.long(0.1)
def test_prompts_of_several_are_read_together(engine: Engine) -> None:
    texts = {n: LONG[: 500 + 50 * n] for n in range(2)}
    slots = engine.expert_cache.slots
    steps = {}
    for one in engine.generate_many([BatchRequest(n, text, ONE) for n, text in texts.items()], 2):
        if one.piece is not None and one.piece.step is not None:
            steps[one.piece.step.index] = one.piece.step
    read = [one for one in steps.values() if one.phase == "prefill"]
    assert len(read) == 1 and read[0].tokens > 1000 and read[0].slots < slots
    assert engine.expert_cache.slots == slots and engine.memory().workspace == engine.sizes.workspace


def test_only_prompts_that_go_on_from_piece_to_piece_borrow(path: Path) -> None:
    spec = LoadSpec.checked(str(path), Settings({"budget": "50%"}), context=1500)
    found = plan(spec).sizes
    assert [one.chunk for one in found.longer] == [1024, 2048]
    assert [one.extra for one in found.longer] == sorted(one.extra for one in found.longer) and found.longer[0].extra
    assert not plan(replace(spec, context=500)).sizes.longer
