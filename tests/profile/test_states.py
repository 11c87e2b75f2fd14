"""The estimator's training data: on disk, in bounded memory, of as many tokens as asked for, and gone afterwards."""

import gc
import os
import shutil
import threading
import tracemalloc
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.errors import ProfileError, SettingError
from core.measure.calibrate import state_file, states
from core.measure.calibrate.gather import calibrate
from core.measure.calibrate.state_file import StateFile
from core.measure.calibrate.states import HELD_OUT, States
from core.memory.store import Cancelled
from core.profile import Profile, load, save
from core.runtime.measurement import LayerRun
from core.settings.calibration import CalibrationSettings
from core.types import ModelShape
from tests.profile.oracle import Oracle
from tests.selection import layered

L, E, K, H = 3, 8, 4, 64
BEFORE = 8192  # tokens that were kept in memory once, at most; fewer of a large model
TEXT = "Nothing is fetched that is there already, and what is not there is fetched before it is asked for. "
SHAPE = ModelShape(L, E, K, H, 1)


def settings(**values: object) -> CalibrationSettings:
    return CalibrationSettings.checked(**{f"estimator_{name}": value for name, value in values.items()})


def feed(kept: States, total: int, pieces: list[int]) -> None:
    """Tokens 0 .. total: token t has the router input t + layer / 2 and the distribution t + layer everywhere."""
    for part in np.split(np.arange(total), pieces):
        kept.begin(len(part))
        for layer in range(L):
            each = torch.tensor(part, dtype=torch.float32)[:, None]
            seen = SimpleNamespace(
                layer=layer, hidden=(each + layer / 2).expand(-1, H), probs=(each + layer).expand(-1, E), residual=None
            )
            run = SimpleNamespace(
                seen=seen, ids=torch.zeros(len(part), K, dtype=torch.int64), weights=each.expand(-1, K)
            )
            kept.add(cast(LayerRun, run))


def opened(total: int, tokens: int = BEFORE, kind: str = "hidden", folder: Path | None = None) -> States:
    sites: Any = [SimpleNamespace(router=None)] * L
    return States(SHAPE, sites, torch.device("cpu"), total, settings(input=kind, tokens=tokens), folder)


def read(file: StateFile, size: int = 7, seed: int = 0) -> list[tuple[int, float, float]]:
    found = []
    for layer, inputs, probs in file.batches(size, torch.Generator().manual_seed(seed)):
        assert len(layer) <= size and inputs.dtype == probs.dtype == torch.float32
        assert (inputs == inputs[:, :1]).all() and (probs == probs[:, :1]).all()
        found += list(zip(layer.tolist(), inputs[:, 0].tolist(), probs[:, 0].tolist(), strict=True))
    return found


@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_every_example_is_read_once_in_an_order_of_its_own(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state belongs to the routing of the layer after it, however few blocks are mixed at a time."""
    kept = opened(40)
    monkeypatch.setattr(state_file, "BLOCK_BYTES", 5 * kept.train._layout.itemsize)
    monkeypatch.setattr(state_file, "POOL_BYTES", blocks * 5 * kept.train._layout.itemsize)
    kept = opened(40)
    feed(kept, 40, [9, 10, 31])
    tested = [t for t in range(40) if t % HELD_OUT == HELD_OUT - 1]
    for file, tokens in ((kept.train, sorted(set(range(40)) - set(tested))), (kept.test, tested)):
        expected = [(layer, t + (layer - 1) / 2, t + layer) for t in tokens for layer in range(1, L)]
        first, again, other = read(file), read(file), read(file, seed=1)
        assert sorted(first) == sorted(other) == sorted(expected) and file.count == len(expected)
        assert first == again and first != other
    assert kept.trained == 36
    kept.close()


@pytest.mark.parametrize("rounds", layered([100, 400], quick=lambda rounds: rounds == 100))
def test_every_token_has_the_same_chance(monkeypatch: pytest.MonkeyPatch, rounds: int) -> None:
    total, tokens, hits = 60, 20, np.zeros(60)
    for seed in range(rounds):
        monkeypatch.setattr(states, "SEED", seed)
        kept = opened(total, tokens)
        feed(kept, total, [7, 25, 26, 59])
        found = Counter(int(probs - layer) for file in (kept.train, kept.test) for layer, _, probs in read(file))
        assert len(found) == tokens and set(found.values()) == {L - 1}  # nobody twice, and layers belong together
        hits[list(found)] += 1
        kept.close()
    expected = rounds * tokens / total
    assert (abs(hits - expected) < 5 * np.sqrt(expected * (1 - tokens / total))).all()


@pytest.mark.parametrize("kind", ["hidden", "quasi"])
def test_it_takes_the_room_that_is_foretold(kind: str) -> None:
    kept = opened(50, 30, kind)
    feed(kept, 50, [25])
    written = sum(os.fstat(file._file.fileno()).st_size for file in (kept.train, kept.test) if not file._file.flush())
    assert written == settings(input=kind, tokens=30).training_bytes(SHAPE, 50) > 0
    kept.close()


def held() -> int:
    """Bytes of all tensors there are, each memory once."""
    gc.collect()
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors()}
    return sum(storages.values())


def _tensors() -> list[torch.Tensor]:
    return [one for one in gc.get_objects() if type(one) is torch.Tensor and one.device.type == "cpu"]


@pytest.mark.long(0.1)
def test_more_tokens_than_memory_holds_are_read(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten thousand tokens, above the 8192 of before, in a twentieth of the memory that their states take."""
    pool, tokens, most = 96 << 10, 10_000, [0, 0]
    monkeypatch.setattr(state_file, "BLOCK_BYTES", 8 << 10)
    monkeypatch.setattr(state_file, "POOL_BYTES", pool)
    monkeypatch.setattr("core.policy.predict.nets.estimator.STEPS", 1)
    chosen = settings(tokens=tokens, input="hidden", width=16)
    on_disk = chosen.training_bytes(engine.shape, tokens)
    before = 0

    def progress(text: str, share: float) -> None:
        nonlocal before
        if text.startswith("Reading") and not tracemalloc.is_tracing():
            tracemalloc.start()
            before = held()
        elif text.startswith("Training"):
            most[0] = max(most[0], held() - before)
            assert os.listdir(tmp_path) == [], "the files have no names"

    try:
        profile = calibrate(
            engine,
            [TEXT * (tokens // len(TEXT) + 1)],
            parts={"estimator"},
            limit=tokens,
            settings=chosen,
            folder=tmp_path,
            progress=progress,
        )
        most[1] = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    gathered = cast(dict[str, Any], profile.settings["gathered"])
    assert gathered["estimator"]["tokens"] == tokens - tokens // HELD_OUT > BEFORE
    assert on_disk > 20 * pool
    assert most[0] < 3 * pool, "tensors: the pool, a minibatch, and the network with its optimiser"
    assert most[1] < on_disk / 2, "all of Python's and numpy's memory, with the texts themselves"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("place", ["Reading", "Training the estimator"])
def test_cancelling_leaves_no_files(engine: Engine, tmp_path: Path, place: str) -> None:
    cancel, free = threading.Event(), list[int]()

    def progress(text: str, share: float) -> None:
        if text.startswith(place):
            assert os.name != "posix" or os.listdir(tmp_path) == [], "a crash would leave files that have names"
            free.append(len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0)
            cancel.set()

    open_files = len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    with pytest.raises(Cancelled):
        calibrate(engine, [TEXT], parts={"estimator"}, folder=tmp_path, progress=progress, cancel=cancel)
    assert os.listdir(tmp_path) == []
    if free[0]:
        assert free[0] == open_files + 2 and len(os.listdir("/proc/self/fd")) == open_files


def test_a_disk_without_room_is_refused_first(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, steps = settings(tokens=100, input="hidden"), list[str]()
    each = chosen.training_bytes(engine.shape, 1)
    usage = SimpleNamespace(free=states.SPARE_BYTES + 40 * each + 7)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(
        ProfileError, match=r"on 100 tokens needs .* of disk.* estimator_tokens to at most 40, or leave"
    ):
        calibrate(engine, [TEXT * 2], settings=chosen, folder=tmp_path, progress=lambda text, share: steps.append(text))
    assert not steps and not engine.busy
    few = calibrate(engine, [TEXT * 2], parts={"estimator"}, settings=settings(tokens=40, input="hidden", width=8))
    assert few.has("estimator")


def test_a_disk_that_becomes_full_is_said(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: StateFile, records: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(StateFile, "_append", full)
    with pytest.raises(ProfileError, match="cannot be kept on disk: No space left on device"):
        calibrate(engine, [TEXT], parts={"estimator"})
    assert not engine.busy


def test_the_width_is_the_networks(engine: Engine, tmp_path: Path) -> None:
    sizes = []
    for width in (8, 64):
        profile = calibrate(engine, [TEXT], parts={"estimator"}, settings=settings(width=width))
        assert profile.nets["estimator.reduce.weight"].shape == (width, H)
        assert profile.nets["estimator.head.weight"].shape == (E, width)
        save(profile, tmp_path / "p")
        sizes.append((tmp_path / "p").stat().st_size)
        again = load(tmp_path / "p")
        assert again.settings["estimator"] == {"layers": L, "experts": E, "hidden": H, "width": width, "quasi": 0}
    assert sizes[1] > sizes[0] + 4 * 56 * (H + E)


def fed(engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Profile, np.ndarray]:
    """The profile, and the inputs [n, L-1, H] that were trained on, of the tokens of TEXT in order."""
    inputs = dict[int, list[torch.Tensor]]()
    plain = States._inputs

    def noted(self: States, records: Any) -> torch.Tensor:
        found = plain(self, records)
        for layer in range(1, L):
            inputs.setdefault(layer, []).append(found[records["layer"] == layer].float())
        return found

    monkeypatch.setattr(States, "_inputs", noted)
    monkeypatch.setattr("core.policy.predict.nets.estimator.STEPS", 1)
    profile = calibrate(engine, [TEXT], parts={"estimator"}, settings=settings(input=kind, width=8))
    return profile, np.stack([inputs[layer][0].numpy() for layer in range(1, L)], 1)


@pytest.mark.parametrize("kind", ["hidden", "quasi"])
def test_what_it_is_trained_on(kind: str, engine: Engine, chat_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain transformers: h_l, or Norm_{l+1}(r_l + sum of weight * default vector)."""
    profile, inputs = fed(engine, kind, monkeypatch)
    oracle = Oracle(chat_model("qwen3_moe"))
    layers, residuals = oracle.model.model.layers, list[torch.Tensor]()
    for layer in layers:
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda module, args: residuals.append(args[0][0].clone())
        )
    text = oracle.read(engine.prompt.tokenizer(TEXT).input_ids)
    trained = [t for t in range(len(text.ids[0])) if t % HELD_OUT != HELD_OUT - 1]
    for layer in range(L - 1):
        expected = text.hidden[layer]
        if kind == "quasi":
            assert profile.defaults is not None, "they are measured with it"
            vectors = torch.from_numpy(profile.defaults[layer]).float()[text.ids[layer]]  # [T, k, H]
            output = (text.weights[layer][..., None] * vectors).sum(1)
            with torch.no_grad():
                expected = layers[layer + 1].post_attention_layernorm(residuals[layer] + output)
        np.testing.assert_allclose(inputs[:, layer], expected[trained].numpy(), rtol=4e-3, atol=4e-3)
    assert (kind == "quasi") == profile.has("defaults")


def test_values_out_of_bounds_are_refused() -> None:
    for values, said in (
        ({"estimator_width": -1}, "between 0 and 8192"),
        ({"estimator_tokens": 1}, "between 16 and"),
        ({"estimator_input": "luck"}, "hidden, quasi"),
        ({"luck": 1}, "no calibration setting called"),
    ):
        with pytest.raises(SettingError, match=said):
            CalibrationSettings.checked(**values)
