"""Packs of random bytes, written without a model: what reader, writer and verification are tested on."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch

from core.memory.codec import Layout, PartSpec
from core.memory.codec.formats import Numbers
from core.memory.codec.segments import ExpertParts, Segments
from core.memory.pack import Manifest, PackWriter
from core.memory.pack.manifest import identity_of
from core.memory.pages import page_up

LAYERS, EXPERTS, HIDDEN, INNER = 3, 5, 64, 48
PARTS = {
    "gate_up_proj": PartSpec((2 * INNER, HIDDEN), torch.float32),
    "down_proj": PartSpec((HIDDEN, INNER), torch.float32),
}
LAYOUT = Layout.of({n: (s.dtype, s.shape) for n, s in PARTS.items()})
NUMBERS = Numbers(torch.float32, torch.float32, torch.float32)
DENSE = {"embed.weight": torch.arange(512.0).view(32, 16), "norm.weight": torch.ones(16, dtype=torch.bfloat16)}


IDENTITY = identity_of("model", "checkpoint", NUMBERS, 0, "test")


def random_blobs(seed: int = 0) -> torch.Tensor:
    """[layers, experts, blob bytes] uint8."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (LAYERS, EXPERTS, LAYOUT.bytes), dtype=torch.uint8, generator=rng)


def write_pack(out: Path, seed: int = 0, top: int = 0, stop_after: int = LAYERS) -> Path:
    """A whole pack, or what an import that was stopped after some layers leaves."""
    blobs = random_blobs(seed)
    cutter = Segments(LAYOUT, ExpertParts(PARTS, False, True, True), (top, INNER)) if top else None
    identity = identity_of(f"model {seed}", "checkpoint", NUMBERS, top, "test")
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
        return writer.publish(
            Manifest(
                model_hash=f"model {seed}",
                format="checkpoint",
                numbers=NUMBERS,
                layers=LAYERS,
                experts=EXPERTS,
                top_k=2,
                parts=PARTS,
                is_transposed=False,
                has_gate=True,
                is_concatenated=True,
                layout=LAYOUT,
                segments=cutter.segments if cutter else (),
                padded_bytes=page_up(cutter.bytes if cutter else LAYOUT.bytes),
                files=writer.entries(),
                sums=tuple(writer.finished[f"experts-{n:05}.bin"].sums for n in range(LAYERS)),
                source={"kind": "safetensors", "label": "random", "name": "none", "hash": f"model {seed}"},
                exact=dict.fromkeys(PARTS, "as stored"),
                moestro="test",
                created="2026-01-01T00:00:00+00:00",
            )
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
