"""Fakes of the models on a machine: what one takes, an import, and a pack, as far as it is known without opening it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

from core.errors import ModelError
from core.settings.loading import LoadSpec
from core.types import Fit, Memory, ModelShape

SHAPE = ModelShape(layers=4, experts=16, top_k=2, hidden=32, expert_bytes=100_000)
MB = 10**6


def is_pack(model: str) -> bool:
    """As `core.memory.pack.pack_at` has it; here, so that the fake needs no torch."""
    return (Path(model) / "moestro.json").is_file()


def fake_estimate(spec: LoadSpec, instead_of: Memory | None = None) -> Fit:
    """What `core.capacity.fit.estimate` says of the fake model: below 30 % it does not fit, above 90 % it is tight."""
    share = spec.settings.cache.budget.share
    share = 0.5 if share is None else share
    pack, everything = is_pack(spec.model) and spec.host != "all", SHAPE.total * SHAPE.expert_bytes
    experts = int(share * SHAPE.total) * SHAPE.expert_bytes
    return Fit(
        model=spec.model,
        shape=SHAPE,
        format="int4-g64" if is_pack(spec.model) else spec.format,
        device="cpu",
        context=spec.context or 512,
        context_limit=1024,
        dense=4 * MB,
        kv=MB,
        workspace=MB,
        slots=int(share * SHAPE.total),
        slots_min=8,
        budget=6 * MB + experts,
        budget_min=6 * MB + 8 * SHAPE.expert_bytes,
        budget_all=6 * MB + everything,
        device_free=500 * MB,
        host=everything // (2 if pack else 1),
        host_free=900 * MB,
        disk=everything if pack else 0,
        hit_low=share,
        hit_high=min(1.0, share + 0.3),
        tok_s_low=20 * share,
        tok_s_high=60 * share,
        basis="hit rate: LRU on 512 recorded tokens of this model; "
        f"copies from {'disk' if pack else 'host memory'} at 1.2 GB/s",
        suggested="62%",
        problem="" if share >= 0.3 else "The budget is 1.9 MB short: give at least 6.8 MB or 13 %.",
        warning="" if share <= 0.9 else "Less than 10 % of memory stays free.",
    )


def fake_import(
    source: str,
    out: Path | Callable[[str, str], Path],
    *,
    format: str = "auto",
    split: float = 0.0,
    progress: Callable[[str, float, int, int], None] = lambda text, share, done, total: None,
    cancel: threading.Event | None = None,
    download: bool = False,
) -> Path:
    """What `core.importing.import_model` does, in as many parts as its source is long; it goes on where it stopped.

    A source called "broken..." is refused; "slow..." takes a tenth of a second a part, and waits in the middle for
    somebody to cancel it.
    """
    name = Path(source).name
    if name.startswith("broken"):
        raise ModelError(f"{source} has no config.json. Give a folder with one, or a GGUF file.")
    if not isinstance(out, Path):
        out = out(name, "int4-g64" if format == "auto" else format)
    partial, parts = out.with_name(out.name + ".partial"), 40
    partial.mkdir(parents=True, exist_ok=True)
    journal = partial / "journal.jsonl"
    begun = json.loads(journal.read_text())["part"] if journal.exists() else 0
    for part in range(begun, parts):
        progress(f"Layer {part // 10 + 1} of 4", part / parts, part * MB, parts * MB)
        journal.write_text(json.dumps({"pack": 1, "model_hash": "fake", "moestro": "", "part": part}) + "\n")
        slow = name.startswith("slow") and not begun
        if cancel is not None and cancel.wait(0.0 if not slow else 0.1 if part < parts // 2 else None):
            raise ModelError("Cancelled.")
    progress("Finishing", 1.0, parts * MB, parts * MB)
    journal.unlink()
    fake_pack(partial, source=name, format="int4-g64" if format == "auto" else format)
    partial.replace(out)
    return out


def fake_pack(folder: Path, source: str = "Qwen3-Tiny", format: str = "int4-g64") -> Path:
    """A folder with a whole manifest and files of the right sizes: a pack, as far as can be told without opening it."""
    import torch

    from core.memory.codec import PartSpec, make_codec
    from core.memory.codec.formats import Numbers
    from core.memory.pack import Manifest, PackFile
    from core.memory.pack.kind import Kind
    from core.memory.pack.manifest import DENSE, layer_file
    from core.memory.pages import page_up

    folder.mkdir(parents=True, exist_ok=True)
    parts = {"down_proj": PartSpec((64, 128), torch.bfloat16)}
    codec = make_codec(format, specs=parts, dtype=torch.bfloat16, device=torch.device("cpu"))
    padded = page_up(codec.blob_bytes)
    files = {DENSE: 8, "config.json": 2, **{layer_file(n): SHAPE.experts * padded for n in range(SHAPE.layers)}}
    for name, size in files.items():
        with (folder / name).open("wb") as file:
            file.truncate(size)
    manifest = Manifest(
        model_hash="fake",
        kinds=(Kind(format, codec.blob_layout, (), padded),),
        kind_of=(0,) * SHAPE.layers,
        numbers=Numbers(*[torch.bfloat16] * 3),
        layers=SHAPE.layers,
        experts=SHAPE.experts,
        top_k=SHAPE.top_k,
        parts=parts,
        is_transposed=False,
        has_gate=True,
        is_concatenated=True,
        files={name: PackFile(size) for name, size in files.items()},
        sums=((0,) * SHAPE.experts,) * SHAPE.layers,
        source={"kind": "safetensors", "label": "bfloat16", "name": source, "hash": "fake"},
        exact={"down_proj": "requantised"},
        moestro="0.1.0",
        created="2026-01-01T00:00:00+00:00",
    )
    (folder / "moestro.json").write_text(manifest.dump())
    return folder
