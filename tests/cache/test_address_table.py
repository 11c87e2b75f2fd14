"""Requests made after a token leave the cache as requests made layer by layer do, whichever experts are requested."""

from __future__ import annotations

from collections.abc import Collection

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core.cache.address_table import AddressTable
from core.cache.expert_cache import ExpertCache
from core.settings.registry import variants
from core.types import Outcome
from tests.cache.machine import EXPERTS, LAYERS, build

K = 2
NAMES = [v.name for v in variants("eviction")]
token = st.lists(
    st.lists(st.integers(0, EXPERTS - 1), min_size=K, max_size=K, unique=True), min_size=LAYERS, max_size=LAYERS
)
HOME = [-1 - eid for eid in range(LAYERS * EXPERTS)]  # no address of a slot


class HostTable(AddressTable):
    """In host memory."""

    def __init__(self, expert_cache: ExpertCache) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
            super().__init__(expert_cache, HOME, torch.device("cpu"))
        self.updates = 0

    def _update(self, landed: Collection[int]) -> None:
        super()._update(landed)
        self.updates += 1


def layer_by_layer(expert_cache: ExpertCache, routed: list[list[int]]) -> list[list[int]]:
    """A token computed layer by layer -> the experts of each layer that were missing, in order."""
    expert_cache.begin_pass("decode", 1)
    found = []
    for layer, wanted in enumerate(routed):
        lease = expert_cache.acquire(layer, wanted)
        for held in lease.segments:
            if held.ticket is not None:
                expert_cache.copies.link.wait(held.ticket)
        found.append([held.expert for held in lease.requests if held.outcome == Outcome.MISS])
        expert_cache.release(lease)
    return found


@pytest.mark.parametrize("scope", ["layer", "global"])
@given(
    tokens=st.lists(token, min_size=1, max_size=12),
    eviction=st.sampled_from(NAMES),
    slots=st.integers(LAYERS * (K + 1), LAYERS * EXPERTS),
    bypass=st.booleans(),
)
def test_the_same_experts_stay(
    scope: str, tokens: list[list[list[int]]], eviction: str, slots: int, bypass: bool
) -> None:
    transit = K if bypass and scope == "layer" and slots >= LAYERS * (K + 1) + K else 0
    host, device = (build(slots, scope, eviction, transit) for _ in range(2))
    table = HostTable(device)
    blob = device.copies.expert_bytes
    for routed in tokens:
        layer_by_layer(host, routed)
        device.begin_pass("decode", 1)
        table.sync_table()
        table.check()
        addresses = table.addresses.flatten().tolist()
        found = table.request(routed)
        for cache in (host, device):
            cache.check_integrity()
        assert [bool(slots) for slots in device.core.table] == [bool(slots) for slots in host.core.table]
        assert device.policy.score.tolist() == host.policy.score.tolist()
        counts, others = device.take_counts(), host.take_counts()
        assert counts.bypassed == others.bypassed
        missed = 0
        for layer, (wanted, some) in enumerate(zip(routed, found, strict=True)):
            assert sorted(one.expert for one in some) == sorted(wanted)
            for one in some:
                eid = layer * EXPERTS + one.expert
                missed += addresses[eid] == HOME[eid]
                assert one.outcome == (Outcome.MISS if addresses[eid] == HOME[eid] else Outcome.HIT)
        copied = counts.demand_bytes // blob - missed
        assert 0 <= copied <= sum(map(len, routed)) and counts.demand_bytes == (missed + copied) * blob
    for cache in (host, device):
        cache.copies.link.close()  # type: ignore[attr-defined]


def test_a_copy_is_read_in_its_slot_by_the_token_after_the_next() -> None:
    cache = build(LAYERS * 3)
    table = HostTable(cache)
    outcomes = []
    for _ in range(4):
        cache.begin_pass("decode", 1)
        table.sync_table()
        outcomes.append([one.outcome for one in table.request([[0, 1], [0, 1], [0, 1]])[0]])
    assert outcomes == [[Outcome.MISS] * 2] * 2 + [[Outcome.HIT] * 2] * 2
    assert table.updates == 4
