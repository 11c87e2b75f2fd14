"""Slots of several sizes: their memory, and how many of them a budget pays for."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.capacity.sizes import Sizes
from core.errors import SettingError
from core.memory.arena import Arena
from core.memory.codec import PartSpec, make_codec
from core.memory.codec.layers import LayerCodecs
from core.memory.pages import page_up
from core.policy.allocation.slots import proportional
from core.settings.budget import Budget
from core.settings.config import Settings
from core.types import ModelShape

CPU, EXPERTS = torch.device("cpu"), 6
SPECS = {"gate_up_proj": PartSpec((128, 256), torch.float32), "down_proj": PartSpec((256, 256), torch.float32)}


def codecs_of(*names: str) -> LayerCodecs:
    made = {name: make_codec(name, specs=SPECS, dtype=torch.float32, device=CPU) for name in names}
    return LayerCodecs([made[name] for name in names], EXPERTS)


@pytest.mark.parametrize("paged", [False, True])
def test_slots_of_a_layer_or_of_any(paged: bool) -> None:
    codecs = codecs_of("q4_k/q6_k", "q4_k", "q4_k/q6_k")
    small, large = (page_up(n) if paged else n for n in (codecs[1].slot_bytes, codecs[0].slot_bytes))
    assert codecs.is_mixed and small < large == (page_up(codecs.slot_bytes) if paged else codecs.slot_bytes)
    arena = Arena(codecs, CPU, paged)
    assert arena.expect(3, by_layer=True)
    slots = [arena.allocate(layer) for layer in (0, 1, -1)]
    assert [len(slot.raw) for slot in slots] == [large, small, large] and arena.bytes == 2 * large + small
    slots[1].raw.copy_(held := torch.arange(small) % 251)
    views = slots[1].parts(codecs[1])
    assert slots[1].parts(codecs[1]) is views and not arena.fits(slots[1], 0)
    arena.fit(slots[1], 0)
    assert len(slots[1].raw) == large and slots[1].at == slots[1].raw.data_ptr() == slots[1].parts(codecs[1]).at
    assert torch.equal(slots[1].raw[:small], held.to(torch.uint8))
    assert slots[1].parts(codecs[1]) is not views and arena.bytes == 3 * large
    assert arena.expect(3) and arena.fits(slots[1], 1), "alike again"
    for slot in slots:
        arena.free(slot)
    assert arena.bytes == len(arena) == 0
    assert not Arena(codecs_of("q4_k", "q4_k"), CPU).expect(3, by_layer=True)


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=8),
    st.lists(st.floats(0.0, 1.0), min_size=8, max_size=8),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_a_budget_pays_for_what_each_layer_gets(
    of_layer: list[int], wanted: list[float], share: float, in_bytes: bool
) -> None:
    layers = len(of_layer)
    mean = -(-sum(of_layer) // layers)
    of = () if len({*of_layer}) == 1 else tuple(of_layer)
    sizes = Sizes(ModelShape(layers, EXPERTS, 2, 8, mean), 5, 3, 2, mean, 1, 16, of_layer=of)
    budget = Budget(share=share) if not in_bytes else Budget(bytes=10 + int(share * mean * sizes.slots_all))

    def divide(slots: int) -> Sequence[int]:
        return proportional(wanted[:layers], slots, [0] * layers, EXPERTS)

    slots = sizes.slots_of(budget, divide)
    assert sizes.fixed + sum(n * size for n, size in zip(divide(slots), of_layer, strict=True)) <= (
        sizes.budget_bytes(budget)
    )
    if share == 1.0:
        assert slots == sizes.slots_all, "everything fits into its own bytes"
    if not of:
        assert slots == sizes.slots(budget)
    for settings in ({"scope": "global"}, {"bypass": True}):
        alike = sizes.under(Settings(settings))
        assert (alike.slot, alike.of_layer) == (max(of_layer), ())


def test_the_formats_of_an_expert() -> None:
    for name, why in (
        ("q4_k/q9_k", "no expert format"),
        ("q4_k/q4_k/q4_k", "2 matrices"),
        ("q4_k/checkpoint", "plain"),
    ):
        with pytest.raises(SettingError, match=why):
            codecs_of(name)
    assert [codecs_of(name)[0].name for name in ("q4_k/q4_k", "q4_k/q6_k")] == ["q4_k", "q4_k/q6_k"]
