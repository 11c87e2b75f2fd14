"""A cache with real slots and real copies, and a model of its own to check it against."""

from dataclasses import replace

import torch

from core.cache.copies import CacheMemory
from core.cache.expert_cache import ExpertCache
from core.cache.lease import Lease
from core.memory.arena import Arena
from core.memory.codec import PartSpec, make_codec
from core.memory.codec.layers import LayerCodecs
from core.memory.store import HostStore
from core.memory.transfer import TransferEngine
from core.policy.allocation.slot_allocation import Placement
from core.policy.eviction import policy_maker
from core.settings.param import Choice
from core.types import Outcome

LAYERS, EXPERTS = 3, 6
SPECS = {"gate_up_proj": PartSpec((8, 16), torch.float32), "down_proj": PartSpec((16, 4), torch.float32)}


def build(slots: int, scope: str = "layer", eviction: str = "lru", transit: int = 0) -> ExpertCache:
    """Every weight of expert `eid` has the value `eid`, so that a slot's bytes say whose they are."""
    codec = make_codec("checkpoint", specs=SPECS, dtype=torch.float32, device=torch.device("cpu"))
    codecs = LayerCodecs.alike(codec, LAYERS, EXPERTS)
    store = HostStore(codecs, LAYERS * EXPERTS, pin=False)
    store.fill(
        ({n: torch.full(s.shape, float(eid)) for n, s in SPECS.items()} for eid in range(LAYERS * EXPERTS)),
        lambda share: None,
        None,
    )
    transfers = TransferEngine(torch.device("cpu"), store.fetch)
    placement = replace(Placement.even(LAYERS, EXPERTS, 2, scope), transit=transit)
    memory = CacheMemory(Arena(codecs, torch.device("cpu")), store, transfers)
    return ExpertCache(placement, slots, policy_maker(Choice(eviction)), memory)


def hold(expert_cache: ExpertCache, layer: int, wanted: list[int]) -> Lease:
    """Arrive, acquire and wait, as a layer does; every leased slot then holds its own expert's bytes."""
    expert_cache.arrive(layer, wanted)
    lease = expert_cache.acquire(layer, wanted)
    assert [h.expert for h in sorted(lease.segments, key=lambda h: wanted.index(h.expert))] == wanted
    for held in lease.segments:
        if held.ticket is not None:
            expert_cache.copies.link.wait(held.ticket)
        check_bytes(expert_cache, lease)
    return lease


def check_bytes(expert_cache: ExpertCache, lease: Lease) -> None:
    for held in lease.segments:
        if held.ticket is None or held.ticket.done.is_set():
            for view, _ in held.slot.parts(expert_cache.store.codecs[0]).weights.values():
                assert (view == float(held.segment.eid)).all(), f"slot of {held.segment.eid} holds another expert"


def use(cache: ExpertCache, layer: int, *wanted: int, times: int = 1) -> list[Outcome]:
    for _ in range(times):
        cache.begin_pass("decode", 1)
        lease = hold(cache, layer, list(wanted))
        outcomes = {leased.expert: leased.outcome for leased in lease.segments}
        cache.release(lease)
        cache.check_integrity()
    return [outcomes[expert] for expert in wanted]


def residents(cache: ExpertCache, layer: int) -> list[int]:
    return [expert for expert in range(EXPERTS) if cache.is_resident(layer * EXPERTS + expert)]


def landed(cache: ExpertCache) -> None:
    for eid in list(cache.copies.tickets):
        cache.copies.wait(eid)
