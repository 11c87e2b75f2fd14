"""Measured times: how a pass is cut and summed, by hand; and that what is measured is what there is."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.engine import Engine
from core.importing import import_model
from core.measure.calibrate.gather import calibrate
from core.measure.calibrate.times import _summed, _without
from tests.loaded import loaded
from tests.profile.conftest import MakeEngine
from tests.selection import layered


def test_a_pass_by_hand() -> None:
    """Two layers, three passes: embedding and attention, experts, attention, experts, logits."""
    gaps = np.array([[5.0, 2.0, 1.0, 4.0, 3.0], [5.5, 2.0, 1.0, 4.0, 3.0], [9.0, 8.0, 7.0, 8.0, 9.0]])
    # att: 1, 1, 7 -> 1; moe: 2 2 8 4 4 8 -> 4; head: first gap - att + last = 7, 7.5, 17 -> 7.5
    assert _summed(gaps) == {"att": 1.0, "moe": 4.0, "head": 7.5}
    # No second layer tells attention from the embedding: both are attention's, and the rest is the head's.
    assert _summed(np.array([[5.0, 2.0, 3.0]])) == {"att": 5.0, "moe": 2.0, "head": 3.0}


def test_stalls_are_taken_off_the_experts() -> None:
    assert _without([5.0, 2.0, 1.0, 6.0, 3.0], 4.0) == [5.0, 1.0, 1.0, 3.0, 3.0]
    assert _without([5.0, 2.0, 1.0], 9.0) == [5.0, 0.0, 1.0]


def timed(engine: Engine) -> tuple[dict[str, float], dict[str, Any]]:
    profile = calibrate(
        engine, ["Some words to time, as many as are timed at most, and a few of them more. " * 2], parts={"times"}
    )
    said = profile.settings["times"]
    assert profile.times is not None and isinstance(said, dict)
    return profile.times, said


@pytest.mark.parametrize(
    "settings",
    layered([{"eviction": "none"}, {"scope": "global", "eviction": "lfu"}], quick=lambda settings: "scope" in settings),
)
def test_experts_are_resident_when_a_pass_is_timed(settings: dict[str, object], make_engine: MakeEngine) -> None:
    times, said = timed(make_engine(settings={"budget": "50%", **settings}))
    assert said["all_resident"] is True and said["passes"] >= 2 and said["load_from"] == "memory"
    assert list(times) == ["att", "moe", "head", "load"] and all(value > 0 for value in times.values())
    assert len(said["att_by_layer"]) == len(said["moe_by_layer"]) == 3
    assert said["link"] == "measured"


@pytest.mark.parametrize("settings", layered([{}, {"eviction": "none"}], quick=bool))
def test_a_token_alone_is_routed_otherwise(settings: dict[str, object], make_engine: MakeEngine) -> None:
    """The slots of a layer are for a token's four experts: one that no pass before this one chose fits as well."""
    engine = make_engine(settings={"budget": "50%", **settings})

    def other(module: torch.nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple((t + 1) % 8 if len(t) == 1 and not t.is_floating_point() else t for t in output)

    with engine.loaded.sites[1].router.register_forward_hook(other):
        times, said = timed(engine)
    assert said["all_resident"] is False and all(value > 0 for value in times.values())
    engine.expert_cache.check_integrity()
    resident = [eid for eid in range(24) if engine.expert_cache.is_resident(eid)]
    assert bool(resident) is (settings == {}), "without retention nothing stays"


@pytest.mark.long(0.1)
def test_slots_for_less_than_a_pass(make_engine: MakeEngine) -> None:
    """One pool of four slots serves three layers of four experts each: every pass misses, and its stalls are left out
    of what an emulated link of 2 ms a copy would make of it."""
    engine = make_engine(
        settings={"scope": "global", "budget": "17%", "link": "emulated", "link_gbps": 100.0, "link_latency_us": 2000.0}
    )
    assert engine.expert_cache.slots == 4
    times, said = timed(engine)
    assert said["all_resident"] is False
    assert times["moe"] < 4 * 2.0 <= 4 * times["load"]


@pytest.mark.parametrize(
    "settings",
    layered([{"budget": "63%"}, {"budget": "60%", "scope": "global"}], quick=lambda settings: "scope" not in settings),
)
def test_pinned_experts_stay(settings: dict[str, object], make_engine: MakeEngine) -> None:
    """Five slots a layer hold a pinned expert and a token's four; one pool of 14 has 11 left for three times four."""
    engine = make_engine(settings={"pins": "0:7,1:7,2:7", **settings})
    _, said = timed(engine)
    assert said["all_resident"] or "scope" in settings
    assert all(engine.expert_cache.is_resident(eid) for eid in (7, 15, 23))


@pytest.mark.long(0.1)
def test_the_link_is_the_one_that_is_set(make_engine: MakeEngine) -> None:
    engine = make_engine(settings={"link": "emulated", "link_gbps": 0.5, "link_latency_us": 700.0})
    times, said = timed(engine)
    paced_ms = engine.transfers.pace.duration_s(engine.sizes.blob) * 1e3
    assert times["load"] >= paced_ms or times["load"] == pytest.approx(paced_ms)  # times are rounded
    assert (said["link"], said["link_gbps"], said["link_latency_us"]) == ("emulated", 0.5, 700.0)


@pytest.mark.long(0.1)
def test_experts_on_disk_are_loaded_from_there(chat_model: Callable[[str], Path], tmp_path: Path) -> None:
    pack = import_model(str(chat_model("qwen3_moe")), tmp_path / "pack")
    with loaded(pack, {"budget": "50%"}, host="none", context=128) as engine:
        times, said = timed(engine)
        assert said["load_from"] == "disk" and times["load"] > 0


def test_copies_change_no_weight(make_engine: MakeEngine) -> None:
    engine = make_engine(settings={"budget": "100%"})
    cache = engine.expert_cache
    held = [slot for layer in range(cache.layers) for slot in cache.sample(layer, cache.experts)]
    before = [slot.raw.clone() for slot in held]
    threads = set(threading.enumerate())  # those of earlier tests may still end
    timed(engine)
    assert all((a == slot.raw).all() for a, slot in zip(before, held, strict=True))
    more = [one.name for one in threading.enumerate() if one not in threads]
    assert len(more) < 10, more
