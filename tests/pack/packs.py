"""Packs of random bytes, written without a model: what reader, writer and verification are tested on."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from core.memory.codec import Layout, PartSpec, make_codec
from core.memory.codec.formats import Numbers
from core.memory.codec.segments import ExpertParts, Segments
from core.memory.pack import Manifest, PackWriter
from core.memory.pack.kind import Kind
from core.memory.pack.manifest import identity_of
from core.memory.pages import page_up

LAYERS, EXPERTS, HIDDEN, INNER = 3, 5, 64, 48
PARTS = {
    "gate_up_proj": PartSpec((2 * INNER, HIDDEN), torch.float32),
    "down_proj": PartSpec((HIDDEN, INNER), torch.float32),
}
LAYOUT = Layout.of({n: (s.dtype, s.shape) for n, s in PARTS.items()})
NUMBERS = Numbers(torch.float32, torch.float32, torch.float32)
MIXED = make_codec("int8/nvfp4", specs=PARTS, dtype=torch.float32, device=torch.device("cpu")).blob_layout
DENSE = {"embed.weight": torch.arange(512.0).view(32, 16), "norm.weight": torch.ones(16, dtype=torch.bfloat16)}


IDENTITY = identity_of("model", ["checkpoint"] * LAYERS, NUMBERS, 0, "test")


def random_blobs(seed: int = 0) -> torch.Tensor:
    """[layers, experts, blob bytes] uint8."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYERS, EXPERTS, LAYOUT.bytes), dtype=torch.uint8, generator=rng)


def mixed_blobs(seed: int = 0) -> list[torch.Tensor]:
    """[experts, blob bytes] uint8 of each layer, the second one's in two other formats."""
    return [blobs[:, : MIXED.bytes] if layer == 1 else blobs for layer, blobs in enumerate(random_blobs(seed))]


def write_mixed(out: Path) -> Path:
    """A pack whose second layer has other formats."""
    whole = Kind("checkpoint", LAYOUT, (), page_up(LAYOUT.bytes))
    kinds, kind_of = (whole, Kind("int8/nvfp4", MIXED, (), page_up(MIXED.bytes))), (0, 1, 0)
    with PackWriter(out, identity_of("model", [kinds[at].format for at in kind_of], NUMBERS, 0, "test")) as writer:
        (writer.directory / "config.json").write_text("{}")
        writer.write_dense({n: (t.dtype, tuple(t.shape)) for n, t in DENSE.items()}, DENSE.__getitem__, int)
        for layer, blobs in enumerate(mixed_blobs()):
            writer.write_layer(layer, blobs, int)
        return writer.publish(_manifest(writer, "model", kinds, kind_of))


def write_pack(out: Path, seed: int = 0, top: int = 0, stop_after: int = LAYERS) -> Path:
    """A whole pack, or what an import that was stopped after some layers leaves."""
    blobs = random_blobs(seed)
    cutter = Segments(LAYOUT, ExpertParts(PARTS, False, True, True), (top, INNER)) if top else None
    identity = identity_of(f"model {seed}", ["checkpoint"] * LAYERS, NUMBERS, top, "test")
    with PackWriter(out, identity) as writer:
        if writer.complete:
            return writer.publish()
        (writer.directory / "config.json").write_text(f'{{"model_type": "none", "seed": {seed}}}')
        if "model.safetensors" not in writer.finished:
            writer.write_dense({n: (t.dtype, tuple(t.shape)) for n, t in DENSE.items()}, DENSE.__getitem__, int)
        for layer in range(stop_after):
            if f"experts-{layer:05}.bin" not in writer.finished:
                writer.write_layer(layer, (cutter.cut(b) if cutter else b for b in blobs[layer]), int)
        if stop_after < LAYERS:
            return out
        segments = cutter.segments if cutter else ()
        kind = Kind("checkpoint", LAYOUT, segments, page_up(cutter.bytes if cutter else LAYOUT.bytes))
        return writer.publish(_manifest(writer, f"model {seed}", (kind,), (0,) * LAYERS))


def _manifest(writer: PackWriter, name: str, kinds: tuple[Kind, ...], kind_of: tuple[int, ...]) -> Manifest:
    return Manifest(
        model_hash=name,
        kinds=kinds,
        kind_of=kind_of,
        numbers=NUMBERS,
        layers=LAYERS,
        experts=EXPERTS,
        top_k=2,
        parts=PARTS,
        is_transposed=False,
        has_gate=True,
        is_concatenated=True,
        files=writer.entries(),
        sums=tuple(writer.finished[f"experts-{n:05}.bin"].sums for n in range(LAYERS)),
        source={"kind": "safetensors", "label": "random", "name": "none", "hash": name},
        exact=dict.fromkeys(PARTS, "as stored"),
        moestro="test",
        created="2026-01-01T00:00:00+00:00",
    )


def contents(pack: Path) -> Iterator[tuple[str, bytes]]:
    """Every file by name, to be compared."""
    return ((file.name, file.read_bytes()) for file in sorted(pack.iterdir()))


def same(one: Path, other: Path) -> bool:
    """Whether two packs are equal byte for byte, but for when they were made."""
    ours, theirs = dict(contents(one)), dict(contents(other))
    dated = [json.loads(files.pop("moestro.json")) for files in (ours, theirs)]
    for manifest in dated:
        del manifest["created"], manifest["digest"]
    return ours == theirs and dated[0] == dated[1]
