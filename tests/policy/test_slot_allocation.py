"""Pins and slots per layer as the settings ask for them: what is understood, what is refused, and why."""

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from core.errors import SettingError
from core.policy.allocation.slot_allocation import check_need, check_needs, place
from core.policy.placement import Costs, Layer, layer_s, to_host
from core.settings.config import Settings
from core.settings.pins import Pins
from core.settings.registry import NEEDS_PROFILE, variant, variants

LAYERS, EXPERTS, K = 3, 6, 2
COUNTS = np.array([[9, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 3, 2, 5, 0]])


@dataclass
class AllocationProfile:
    """As much of a profile as is asked for."""

    counts: Any = None
    gate_recall: Any = None
    estimator: Any = None
    plan: Any = None

    def has(self, part: str) -> bool:
        return getattr(self, part) is not None


def placed(slots: int, profile: AllocationProfile | None = None, **settings: object) -> Any:
    found = place(Settings(settings).cache, LAYERS, EXPERTS, K, profile)
    if problem := found.problem(slots):
        raise SettingError(problem)
    return found


def test_pins_have_one_spelling() -> None:
    for text in ("5:1, 0:3", "0:3 5:1", "5:1;0:3,", "0:3,5:1,5:1, none"):
        assert str(Pins.parse(text)) == "0:3, 5:1"
    assert str(Pins.parse("TOP:2, 1:0, top:1")) == "1:0, top:2"
    assert str(Pins.parse("none")) == str(Pins.parse("")) == "" == Settings()["pins"]
    assert Settings({"pins": "2:1 0:0"})["pins"] == "0:0, 2:1"


@pytest.mark.parametrize("text", ["3", "1:", ":2", "1:-2", "top", "top:x", "1:2:3", "bottom:2", "1.5:2"])
def test_what_is_not_a_pin_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(SettingError, match=r"not understood. Write layer:expert pairs like 0:3, 5:17, or top:2"):
        Settings({"pins": text})


def test_pins_become_eids() -> None:
    assert Pins.parse("0:3, 2:5").eids(LAYERS, EXPERTS) == {3, 17}
    # The most used of each layer; in layer 1 all are used alike and the first ones stand for them.
    assert Pins.parse("top:2, 0:5").eids(LAYERS, EXPERTS, COUNTS) == {0, 1, 5, 6, 7, 16, 14}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("3:0", "3:0 names layer 3, but this model has layers 0 to 2 with experts 0 to 5"),
        ("0:6", "0:6 names expert 6"),
        ("top:7", "top:7 is more than the 6 experts"),
        ("top:1", "top:1 needs a profile of this model.* launch.py calibrate`, or open the Calibrate tab"),
    ],
)
def test_pins_that_the_model_does_not_have_are_refused(text: str, why: str) -> None:
    with pytest.raises(SettingError, match=why):
        placed(18, pins=text)


def test_a_pin_list_larger_than_the_slots_is_refused() -> None:
    assert placed(12, pins="1:0, 1:1").pinned == {6, 7}
    with pytest.raises(
        SettingError,
        match=r"Layer 1 has 4 slots, of which 3 pinned experts leave 1, but a token may "
        "need 2 others. Pin fewer experts, or raise the budget",
    ):
        placed(12, pins="1:0, 1:1, 1:2")
    assert len(placed(18, pins=", ".join(f"1:{e}" for e in range(6))).pinned) == 6  # a whole layer needs no other
    with pytest.raises(SettingError, match="5 pinned experts leave 0, but a token may need 1 others"):
        placed(15, pins=", ".join(f"1:{e}" for e in range(5)))


def test_in_one_pool_for_all_layers_pins_are_counted_together() -> None:
    four = "0:0, 0:1, 2:4, 2:5"
    assert placed(6, scope="global", pins=four).divide(6) == [2, 2, 2]
    with pytest.raises(SettingError, match="The cache has 5 slots, of which 4 pinned experts leave 1"):
        placed(5, scope="global", pins=four)


def test_pinned_experts_raise_what_a_layer_gets_at_least() -> None:
    profile = AllocationProfile(COUNTS)
    assert placed(10, profile, layer_slots="profile").divide(10) == [2, 5, 3]
    assert placed(10, profile, layer_slots="profile", pins="0:4, 0:5").divide(10) == [4, 3, 3]


def test_what_needs_a_profile_says_so() -> None:
    assert placed(9).divide(9) == [3, 3, 3] and placed(9).usual.tolist() == [0.0] * 18
    with pytest.raises(
        SettingError,
        match=r"Slots per layer “By use” needs a profile of this model: run python "
        r"launch.py calibrate, or open the Calibrate tab",
    ):
        placed(9, layer_slots="profile")
    with pytest.raises(SettingError, match="“AdapMoE” needs a profile of this model that has gate_recall"):
        placed(9, AllocationProfile(COUNTS), layer_slots="adapmoe")
    whole = AllocationProfile(COUNTS, np.array([np.nan, 0.5, 0.9]))
    assert sum(placed(9, whole, layer_slots="adapmoe").divide(9)) == 9
    assert placed(9, whole).usual.tolist() == COUNTS.ravel().tolist()
    check_needs(Settings({"layer_slots": "adapmoe"}), whole)
    for kind in ("eviction", "predictor"):
        check_need(kind, str(Settings()[kind]), None)


@pytest.mark.parametrize(
    ("kind", "name"), [("predictor", "estimator"), ("predictor", "hybrid"), ("layer_slots", "adapmoe")]
)
def test_what_no_profile_of_a_single_layer_has_is_not_asked_for(kind: str, name: str) -> None:
    with pytest.raises(SettingError, match=r"of the next, and this model has a single one\. Choose another\.$"):
        check_need(kind, name, AllocationProfile(COUNTS[:1]))
    with pytest.raises(SettingError, match="needs a profile of this model that has"):
        check_need(kind, name, AllocationProfile(COUNTS))


def test_one_pool_for_all_layers_needs_no_division() -> None:
    assert placed(9, scope="global", layer_slots="profile").divide(9) == [3, 3, 3]


def test_the_help_of_what_needs_a_profile_says_so() -> None:
    for kind in ("eviction", "predictor", "layer_slots"):
        for choice in variants(kind):
            assert choice.help.endswith(NEEDS_PROFILE) == bool(choice.needs), choice.name
    assert variant("layer_slots", "adapmoe").needs == ("counts", "gate_recall")


def drawn(seed: int) -> tuple[Costs, Layer]:
    of = random.Random(seed)
    seconds = [10 ** of.uniform(-5, -2) for _ in range(4)]
    fixed = [of.choice((0.0, 10 ** of.uniform(-5, -3))) for _ in range(2)]
    costs = Costs(
        copy_s=seconds[0],
        device_fixed_s=fixed[0],
        device_s=seconds[1],
        device_beside_s=max(seconds[1:3]),
        host_fixed_s=fixed[1],
        host_s=seconds[3],
        threads=(threads := of.randrange(4)),
        gpu=threads > 0 and of.random() < 0.4,
    )
    return costs, Layer(of.randrange(9), of.randrange(1, 33), of.choice((0.0, 10 ** of.uniform(-5, -2))))


def played_s(costs: Costs, layer: Layer, hosted: int) -> float:
    """When a layer is over: what each of the two does, event by event."""
    device_s = costs.device_beside_s if costs.threads and hosted else costs.device_s
    work = device = 0.0  # seconds of the host's threads; when the device is free
    if hosted:
        work = costs.host_fixed_s + sum(costs.host_s for _ in range(hosted))
    device += costs.device_fixed_s
    for _ in range(layer.residents):
        device += device_s
    host_end = work
    if not costs.gpu:
        left = work - device if costs.threads else work
        if left > 0:  # of so many threads, from now on shared by one more
            device += left * costs.threads / (costs.threads + 1) if costs.threads else left
        host_end = 0.0
    link = layer.backlog_s
    for _ in range(layer.misses - hosted):
        link += costs.copy_s
        device = max(device, link) + device_s
    return max(device, host_end)


@pytest.mark.parametrize("seed", range(0, 1000, 250))
def test_the_closed_form_is_the_best_of_all_numbers(seed: int) -> None:
    for one in range(seed, seed + 250):
        costs, layer = drawn(one)
        played = [played_s(costs, layer, n) for n in range(layer.misses + 1)]
        for n, seconds in enumerate(played):
            assert layer_s(costs, layer, n) == pytest.approx(seconds), (one, n)
        assert played[to_host(costs, layer)] == pytest.approx(min(played)), (one, costs, layer)


def test_a_link_that_is_behind_leaves_more_to_the_host() -> None:
    costs = Costs(0.1, 0.0, 0.0, 0.0, 0.0, 0.1)
    counts = [to_host(costs, Layer(0, 8, backlog_s)) for backlog_s in (0.0, 0.2, 0.4, 2.0)]
    assert counts == sorted(counts) and counts[0] == 4 and counts[-1] == 8
