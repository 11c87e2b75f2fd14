"""Experts on disk: straight into slots, through a host cache, from several threads at once."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from core.cache.host_rows import HostRows
from core.capacity.tier import ROWS_MIN, choose_tier
from core.memory.arena import Arena
from core.memory.codec import PartSpec, make_codec
from core.memory.codec.formats import Numbers
from core.memory.disk import DiskStore, HostCache, measure_disk
from core.memory.pack import Manifest, PackReader, PackWriter
from core.memory.pack.kind import Kind
from core.memory.pack.manifest import identity_of, layer_file
from core.memory.pages import PAGE, page_up
from core.settings.registry import variants
from core.simulate import Config
from core.simulate.cache import Cache
from core.simulate.run import maker
from tests.selection import examples, layered

CPU = torch.device("cpu")
EXPERTS = 24
SPECS = {"gate_up_proj": PartSpec((64, 32), torch.float32), "down_proj": PartSpec((32, 32), torch.float32)}


LAYERS = 2


def make_pack(out: Path, format: str = "checkpoint") -> Path:
    """Two layers of twelve experts; every weight of expert `eid` is the number `eid`."""
    numbers = Numbers(torch.float32, torch.float32, torch.float32)
    codec = make_codec(format, specs=SPECS, dtype=torch.float32, device=CPU, stored=numbers)
    blobs = [codec.encode({n: torch.full(s.shape, float(eid)) for n, s in SPECS.items()}) for eid in range(EXPERTS)]
    with PackWriter(out, identity_of("model", [format] * LAYERS, numbers, 0, "test")) as writer:
        (writer.directory / "config.json").write_text("{}")
        writer.write_dense({"norm.weight": (torch.float32, (4,))}, lambda name: torch.ones(4), int)
        each = EXPERTS // LAYERS
        for layer in range(LAYERS):
            writer.write_layer(layer, blobs[layer * each : (layer + 1) * each], int)
        return writer.publish(
            Manifest(
                model_hash="model",
                kinds=(Kind(format, codec.blob_layout, (), page_up(codec.blob_bytes)),),
                kind_of=(0,) * LAYERS,
                numbers=numbers,
                layers=LAYERS,
                experts=each,
                top_k=2,
                parts=SPECS,
                is_transposed=False,
                has_gate=True,
                is_concatenated=True,
                files=writer.entries(),
                source={"kind": "safetensors", "label": "float32", "name": "model", "hash": "test"},
                exact={},
                moestro="test",
                sums=tuple(writer.finished[layer_file(n)].sums for n in range(LAYERS)),
                created="",
            )
        )


@pytest.fixture(scope="module", params=["checkpoint", "int4-g32"])
def pack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("disk") / "pack", request.param)


def whose(reader: PackReader, slot: torch.Tensor) -> int:
    codec = reader.manifest.codecs(torch.float32, CPU)[0]
    weights = torch.cat([codec.dequantize(codec.views(slot), part).flatten() for part in SPECS])
    assert torch.allclose(weights, weights[:1].expand_as(weights), atol=1e-2)
    return round(float(weights.mean()))


@pytest.mark.parametrize("direct", [True, False])
def test_the_disk_writes_into_slots_where_they_hold_its_bytes(pack: Path, direct: bool) -> None:
    reader = PackReader(pack, direct=direct)
    codecs = reader.manifest.codecs(torch.float32, CPU)
    codec = codecs[0]
    store, arena = DiskStore(reader, codecs, 0 if codec.verbatim else 1), Arena(codecs, CPU, paged=codec.verbatim)
    for eid in (5, 0, 23, 5):
        slot = arena.allocate()
        assert store.origin(eid) == "disk"
        assert store.fetch(eid, [slot.raw]) == reader.padded_bytes
        assert whose(reader, slot.raw) == eid
        assert not codec.verbatim or slot.raw.data_ptr() % PAGE == 0
    assert reader.bytes_read == 4 * reader.padded_bytes
    assert store.bytes == (0 if codec.verbatim else reader.padded_bytes)
    store.close()


def test_two_threads_read_at_once(pack: Path) -> None:
    reader = PackReader(pack)
    store = DiskStore(reader, reader.manifest.codecs(torch.float32, CPU), 2)
    found: dict[int, int] = {}

    def read(eids: range) -> None:
        for eid in eids:
            slot = torch.zeros(reader.manifest.codecs(torch.float32, CPU).slot_bytes, dtype=torch.uint8)
            store.fetch(eid, [slot])
            found[eid] = whose(reader, slot)

    threads = [threading.Thread(target=read, args=(range(i, EXPERTS, 2),)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {eid: eid for eid in range(EXPERTS)}
    store.close()


def host_cache(reader: PackReader, rows: int, policy: str = "lru") -> HostCache:
    held = HostRows(LAYERS, EXPERTS // LAYERS, rows, maker(Config(policy, rows)))
    return HostCache(reader, reader.manifest.codecs(torch.float32, CPU), rows, False, held)


@examples(25)
@given(eids=st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=60), rows=st.integers(2, 20))
def test_the_host_cache_keeps_what_was_fetched_last(eids: list[int], rows: int) -> None:
    reader = PackReader(_packs["plain"])
    store = host_cache(reader, rows)
    slot = torch.zeros(reader.manifest.codecs(torch.float32, CPU).slot_bytes, dtype=torch.uint8)
    kept: OrderedDict[int, None] = OrderedDict()
    for eid in eids:
        assert store.origin(eid) == ("host" if eid in kept else "disk")
        assert set(store.host_resident()) == set(kept)
        assert store.fetch(eid, [slot]) == (0 if eid in kept else reader.padded_bytes)
        assert whose(reader, slot) == eid
        kept[eid] = None
        kept.move_to_end(eid)
        if len(kept) > rows:
            kept.popitem(last=False)
    assert store.bytes == rows * reader.padded_bytes
    store.close()


def fetched(store: HostCache, reader: PackReader, passes: Sequence[Sequence[int]]) -> list[bool]:
    """Fetch the experts of some passes, in order -> which of them host memory had."""
    slot = torch.zeros(reader.manifest.codecs(torch.float32, CPU).slot_bytes, dtype=torch.uint8)
    hits = []
    for now, eids in enumerate(passes, 1):
        store.begin_pass(now)
        for eid in eids:
            known = store.origin(eid) == "host"
            assert store.fetch(eid, [slot]) == (0 if known else reader.padded_bytes)
            assert whose(reader, slot) == eid
            hits.append(known)
    return hits


@pytest.mark.parametrize(
    "policy", layered([v.name for v in variants("eviction")], quick=lambda name: name in ("lru", "lfu", "none"))
)
@settings(max_examples=6)
@given(
    passes=st.lists(st.lists(st.integers(0, EXPERTS - 1), max_size=8, unique=True).map(sorted), max_size=12),
    rows=st.integers(2, 12),
)
def test_the_host_cache_follows_any_policy(policy: str, passes: list[list[int]], rows: int) -> None:
    reader, experts = PackReader(_packs["plain"]), EXPERTS // LAYERS
    store = host_cache(reader, rows, policy)
    simulated = Cache(maker(Config(policy, rows)), LAYERS, experts, 1, "global", [rows])
    expected = [
        simulated.alone(0, [eid], now, eid // experts) == 0 for now, eids in enumerate(passes, 1) for eid in eids
    ]
    assert fetched(store, reader, passes) == expected
    store.close()


def test_policies_of_the_host_cache_differ() -> None:
    """Experts that come round and round: LRU evicts each just before its use."""
    hits: dict[str, int] = {}
    for policy in ("lru", "random", "none"):
        reader = PackReader(_packs["plain"])
        store = host_cache(reader, 6, policy)
        hits[policy] = sum(fetched(store, reader, [range(8)] * 10))
        store.close()
    assert hits["lru"] == hits["none"] == 0 and hits["random"] > 0


def test_another_policy_takes_over_what_the_host_cache_holds() -> None:
    reader = PackReader(_packs["plain"])
    store = host_cache(reader, 6)
    assert not any(fetched(store, reader, [range(8)] * 3))
    store.use_policy(maker(Config("random", 6)), 0.0)
    assert [store.origin(eid) for eid in range(8)].count("host") == 6, "nothing left because of the change"
    assert any(fetched(store, reader, [range(8)] * 3))
    store.close()


_packs: dict[str, Path] = {}


@pytest.fixture(scope="module", autouse=True)
def plain(tmp_path_factory: pytest.TempPathFactory) -> None:
    _packs["plain"] = make_pack(tmp_path_factory.mktemp("plain") / "pack")


def test_a_failed_read_leaves_nothing_in_the_host_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = PackReader(_packs["plain"])
    store = host_cache(reader, 2)
    slot = torch.zeros(reader.manifest.codecs(torch.float32, CPU).slot_bytes, dtype=torch.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(reader, "read_into", lambda eid, buffer: 1 / 0)
        for eid in range(3):  # more than there are rows: none is lost
            with pytest.raises(ZeroDivisionError):
                store.fetch(eid, [slot])
    assert store.origin(0) == "disk"
    store.fetch(7, [slot])
    assert whose(reader, slot) == 7
    store.close()


def test_tiers() -> None:
    cuda = torch.device("cuda")
    assert choose_tier("auto", CPU, 100, PAGE, True, 10**9).kind == "disk"
    assert choose_tier("none", CPU, 100, PAGE, True, 10**9).bytes == 0
    assert choose_tier("none", CPU, 100, PAGE, False, 10**9).bytes > 0  # what the readers re-lay from
    assert choose_tier("all", CPU, 100, PAGE, True, 0).bytes == 100 * PAGE
    assert choose_tier("auto", cuda, 100, PAGE, True, 10**9).kind == "all"
    part = choose_tier("auto", cuda, 100, PAGE, True, 100 * PAGE)
    assert (part.kind, part.rows) == ("cache", 85)
    assert choose_tier("none", cuda, 100, PAGE, True, 10**9).rows == ROWS_MIN
    assert choose_tier(str(50 * PAGE + 1), CPU, 100, PAGE, True, 10**9).rows == 50
    assert choose_tier(str(200 * PAGE), CPU, 100, PAGE, True, 10**9).kind == "all"


def test_a_disk_is_timed_once(pack: Path) -> None:
    assert measure_disk(pack) is measure_disk(pack)
    assert measure_disk(pack).gbps > 0
