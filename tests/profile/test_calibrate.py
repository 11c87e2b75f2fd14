"""Calibration leaves the engine as it found it, however it ends; and what it refuses."""

import itertools
import threading
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.errors import BusyError, ProfileError, SettingError
from core.hf.cached_pass import cached_pass
from core.measure.calibrate.gather import calibrate
from core.measure.evaluate.calibrated import missing
from core.measure.evaluate.modes import modes_of
from core.memory.store import Cancelled
from core.profile import PARTS, load, save
from core.profile.trace import ArrayTrace, Trace, TraceHead, TraceWriter, open_trace
from core.profile.trace.file import FileTrace
from core.settings.calibration import CalibrationSettings
from core.settings.sampling import Sampling
from tests.checkpoints import make_checkpoint
from tests.equality.passes import PROMPT
from tests.loaded import loaded
from tests.profile.conftest import MakeEngine
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

TEXTS = ["Nothing is fetched that is there already.", "A text in another tongue: pane, pain, Brot."]
BRIEF = CalibrationSettings(path_tokens=60, path_answer=12)


@dataclass
class State:
    logits: torch.Tensor
    hooks: list[tuple[str, int]]
    rest: list[object]


@torch.inference_mode()
def state(engine: Engine) -> State:
    # `watch` leaves nothing but a note of where the norms are; let it look before the first comparison
    logits = cached_pass(engine.model, torch.tensor([PROMPT]), engine.fresh_cache()).logits.clone()
    engine.expert_cache.check_integrity()
    hooks = [
        (name, len(module._forward_hooks) + len(module._forward_pre_hooks))
        for name, module in engine.model.named_modules()
    ]
    rest = [
        dict(engine.settings),
        engine.predictor_host.predictor,
        engine.transfers.pace,
        engine.busy,
        engine.profile,
        torch.get_num_threads(),
        engine.wiring.measuring.step._tap,
        engine.parts.recorder.index,
        engine.expert_cache.placement.scope,
        engine.expert_cache.slots,
    ]
    return State(logits, hooks, rest)


def same(before: State, after: State) -> None:
    assert torch.equal(before.logits, after.logits)
    assert before.hooks == after.hooks
    assert before.rest == after.rest


def answers(engine: Engine) -> None:
    assert list(engine.generate("Go on: ", Sampling(max_new_tokens=4)))[-1].stats is not None


@pytest.mark.parametrize(
    "settings",
    layered(
        [
            {"predictor": "gate", "scope": "global"},
            {"eviction": "none", "telemetry": "off", "link": "emulated", "link_gbps": 8.0},
        ],
        quick=lambda settings: "predictor" in settings,
    ),
)
def test_the_engine_is_as_it_was(settings: dict[str, object], make_engine: MakeEngine) -> None:
    engine = make_engine(settings=settings)
    before = state(engine)
    profile = calibrate(engine, TEXTS, parts=set(PARTS) - {"estimator", "path"})
    same(before, state(engine))
    assert set(profile.parts()) == set(PARTS) - {"estimator", "path"}
    answers(engine)


PLACES = ("Reading", "Writing", "Measuring", "Training the estimator", "Training the routing")


@pytest.mark.parametrize(
    ("at", "how"),
    layered(
        itertools.product(PLACES, ("cancel", "error")),
        quick=lambda case: case in {("Measuring", "error"), (PLACES[3], "cancel")},
    ),
)
def test_it_can_break_off_anywhere(at: str, how: str, engine: Engine) -> None:
    cancel = threading.Event()
    before = state(engine)

    def progress(text: str, share: float) -> None:
        if text.startswith(at):
            if how == "error":
                raise ZeroDivisionError
            cancel.set()

    with pytest.raises(Cancelled if how == "cancel" else ZeroDivisionError):
        calibrate(engine, TEXTS, settings=BRIEF, progress=progress, cancel=cancel)
    same(before, state(engine))
    answers(engine)


@pytest.mark.long(0.1)
def test_progress_grows_to_the_end(engine: Engine) -> None:
    told: list[tuple[str, float]] = []
    calibrate(engine, TEXTS, settings=BRIEF, progress=lambda text, share: told.append((text, share)))
    shares = [share for _, share in told]
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    assert (
        list(dict.fromkeys(text.split(" ")[0] for text, _ in told))
        == "Reading Writing Measuring Training Calibrated".split()
    )


def test_nobody_else_is_served_meanwhile(make_engine: MakeEngine) -> None:
    engine, refused = make_engine(), list[str]()

    def progress(text: str, share: float) -> None:
        if refused:
            return
        assert engine.busy
        for ask in (lambda: next(engine.generate("Hello")), engine.unload, lambda: calibrate(engine, TEXTS)):
            with pytest.raises(BusyError) as error:
                ask()
            refused.append(str(error.value))
        engine.change({"budget": "75%"})  # acts when it is over

    calibrate(engine, TEXTS, parts={"counts"}, progress=progress)
    assert refused[:2] == ["The model is being calibrated."] * 2 and "answering" not in refused[2]
    answers(engine)
    assert engine.expert_cache.slots == 18
    chat = engine.generate("Hello")
    next(chat)
    with pytest.raises(BusyError, match="Stop the answer first"):
        calibrate(engine, TEXTS)
    chat.close()


def test_what_it_cannot_do_is_said(engine: Engine) -> None:
    with pytest.raises(SettingError, match=r"no part luck\. Its parts: counts, pairs"):
        calibrate(engine, TEXTS, parts={"counts", "luck"})
    with pytest.raises(SettingError, match="nothing to calibrate on"):
        calibrate(engine, ["", ""], parts={"counts"})
    assert calibrate(engine, [], parts={"counts", "times"}).parts() == ("times",)  # times need no text
    few = calibrate(engine, TEXTS, parts={"counts"}, limit=50)
    assert few.tokens == 50 and few.counts is not None and few.counts[0].sum() == 50 * 4


def test_what_a_single_layer_cannot_say_of_the_next_is_not_asked_for(tmp_path: Path) -> None:
    path = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path, num_hidden_layers=1))
    with loaded(path, {"budget": "50%"}, dtype="float32", context=128) as engine:
        profile = calibrate(engine, TEXTS[:1], parts={"counts", "gate_recall", "estimator"})
        assert profile.parts() == ("counts",)
        with pytest.raises(SettingError, match=r"^gate_recall: of a model with a single MoE layer"):
            calibrate(engine, TEXTS[:1], parts={"gate_recall"})
        engine.use_profile(profile)
        with pytest.raises(SettingError, match=r"this model has a single one\. Choose another"):
            engine.change({"predictor": "hybrid"})
        assert not missing(engine, modes_of(("hybrid",)), engine.settings) & {"gate_recall", "estimator"}


@pytest.mark.long(0.1)
def test_the_profile_belongs_to_the_engine_it_was_made_with(make_engine: MakeEngine) -> None:
    one, other = make_engine(), make_engine("mixtral")
    profile = calibrate(one, TEXTS[:1], parts={"counts"})
    one.use_profile(profile)
    assert one.profile is profile
    with pytest.raises(ProfileError, match="says nothing about"):
        other.use_profile(profile)
    assert other.profile is None


def recorded(engine: Engine, path: Path, hashed: str = "") -> tuple[Trace, list[int], np.ndarray]:
    """An answer's routing as it is recorded, with the ids of its tokens: (trace, tokens, ids [T, L, k])."""
    shape, ids, tokens = engine.shape, list[np.ndarray](), list[int]()
    prompt = engine.prompt.encode("A recorded talk", engine.context)
    pieces = [p for p in engine.generate("A recorded talk", Sampling(max_new_tokens=40)) if p.step is not None]
    out = [p.token for p in pieces if p.kind == "token" and p.token is not None]
    with TraceWriter(
        path, TraceHead(shape.layers, shape.experts, shape.top_k, model="tiny", model_hash=hashed or engine.model_hash)
    ) as writer:
        given = iter([prompt, *([t] for t in [97, *out])])
        for piece in pieces:
            some = next(given)[: piece.step.tokens]
            writer.add(piece.step, np.array(some))
            ids.append(piece.step.ids.transpose(1, 0, 2))
            tokens += some
    return open_trace(path), tokens, np.concatenate(ids)


def test_recorded_routing_counts(engine: Engine, tmp_path: Path) -> None:
    trace, tokens, ids = recorded(engine, tmp_path / "talk")
    profile = calibrate(engine, [], traces=[trace])
    assert profile.parts() == ("counts", "pairs", "times", "path")  # what routing alone can tell
    assert profile.tokens == len(tokens) and profile.pairs_weighted is None
    for layer in range(engine.shape.layers):
        assert profile.counts[layer].tolist() == np.bincount(ids[:, layer].ravel(), minlength=8).tolist()
    both = calibrate(engine, TEXTS, traces=[trace], parts={"counts"})
    alone = calibrate(engine, TEXTS, parts={"counts"})
    assert both.counts is not None and alone.counts is not None
    np.testing.assert_array_equal(both.counts, alone.counts + profile.counts)


def test_recorded_weights_count(engine: Engine) -> None:
    ids = np.array([[[0, 1, 2, 3]] * 3, [[0, 1, 4, 5]] * 3])
    weights = np.array([[[0.4, 0.3, 0.2, 0.1]] * 3, [[0.25] * 4] * 3])
    profile = calibrate(engine, [], traces=[ArrayTrace(ids, 8, weights=weights)], parts={"pairs", "tae"})
    assert profile.parts() == ("pairs", "tae")
    assert profile.pairs_weighted[2, 0, 1] == pytest.approx(0.3 + 0.25, rel=1e-3)
    warm = calibrate(engine, [], traces=[ArrayTrace(ids, 8, weights=weights)], parts={"counts", "pairs"}, warmup=4)
    assert warm.pairs[2, 0, 1] == 1 / 4 + 2 / 4 and warm.counts[2, 0] == 2
    assert warm.pairs_weighted[2, 0, 1] == pytest.approx(0.3 / 4 + 0.25 / 2, rel=1e-3)
    assert warm.settings["pairs"] == {"warmup": 4} and "pairs" not in profile.settings


def test_a_trace_of_another_model_is_refused(engine: Engine, tmp_path: Path) -> None:
    trace, _, _ = recorded(engine, tmp_path / "other", hashed="f" * 64)
    assert isinstance(trace, FileTrace)
    with pytest.raises(ProfileError, match=r"recorded with tiny \(ffffffffffff\), not with"):
        calibrate(engine, TEXTS, traces=[trace])
    with pytest.raises(ProfileError, match="3 layers of 16 experts, 4 active"):
        calibrate(engine, TEXTS, traces=[ArrayTrace(np.zeros((5, 3, 4), int), 16)])


def test_a_profile_in_use_survives_being_replaced_on_disk(engine: Engine, tmp_path: Path) -> None:
    profile = calibrate(engine, TEXTS, parts={"counts", "maps"})
    save(profile, tmp_path / "p")
    held = load(tmp_path / "p", model_hash=engine.model_hash)
    save(calibrate(engine, TEXTS[:1], parts={"counts"}), tmp_path / "p")
    assert held.counts is not None and profile.counts is not None
    np.testing.assert_array_equal(held.counts, profile.counts)
