"""Expert packs: manifest, blobs and files, with digests and checksums made anew or not."""

import hashlib
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.torch import load_file, save_file

from core.importing import import_model
from tests.fuzz import models
from tests.fuzz.changes import Change, Gone, act, read_document
from tests.fuzz.checkpoint import HEAD, IMPORTED
from tests.fuzz.draw import byte_change, file_change, header_bytes, json_change
from tests.fuzz.mutant import Mutant
from tests.tiny_tokenizer import save_tokenizer

MANIFEST, DENSE = "pack/moestro.json", "pack/model.safetensors"
SEALED = ("pack/config.json", "pack/generation_config.json", "pack/tokenizer.json", "pack/tokenizer_config.json")
FORMATS: dict[str, dict[str, Any]] = {"whole": {}, "split": {"blocks": 2}, "int4": {"format": "int4-g32"}}


@act("seal")
def seal(file: Path, change: Mapping[str, Any]) -> None:
    """Make the manifest say what the files named in "sealed" are now, and its digest what the manifest is."""
    body = read_document(file)
    if not isinstance(body, dict):
        raise Gone
    for name in change["sealed"]:
        _restate(body, file.parent / name)
    text = json.dumps(body) if change["sealed"] else file.read_text(encoding="utf-8")
    body.pop("digest", None)
    try:
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    except (TypeError, RecursionError):
        raise Gone from None
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    file.write_text(re.sub(r'"digest":\s*"\w*"', f'"digest": "{digest}"', text), encoding="utf-8")


def _restate(body: dict[str, Any], file: Path) -> None:
    """Size, digest and checksums of one file."""
    try:
        data, entry = file.read_bytes(), body["files"][file.name]
        entry["bytes"] = len(data)
        if entry["sha256"]:
            entry["sha256"] = hashlib.sha256(data).hexdigest()
        if entry["head"]:
            entry["head"] = hashlib.sha256(data[: 8 + int.from_bytes(data[:8], "little")]).hexdigest()
        if found := re.fullmatch(r"experts-(\d+)\.bin", file.name):
            layer = int(found[1])
            size = (body["kinds"][body["kind_of"][layer]] if "kinds" in body else body)["padded_bytes"]
            body["crc32"][layer] = [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]
    except (OSError, KeyError, TypeError, IndexError):
        raise Gone from None


class Packs:
    """Beside each pack lies the checkpoint it was made of, for plain transformers."""

    name = "pack"
    samples = (*FORMATS, *IMPORTED)

    def make(self, sample: str, folder: Path) -> None:
        if sample in IMPORTED:  # of these only the pack is read again
            with tempfile.TemporaryDirectory() as made:
                import_model(str(save_tokenizer(IMPORTED[sample](Path(made)))), folder / "pack")
        else:
            models.make_model("qwen3_moe", folder / "checkpoint")
            import_model(str(folder / "checkpoint"), folder / "pack", **FORMATS[sample])

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        blobs = sorted(f"pack/{file.name}" for file in (folder / "pack").glob("experts-*.bin"))

        def dense() -> Change:
            return byte_change(rng, folder, DENSE, header_bytes(folder, DENSE))

        def part() -> tuple[Change, str | None, float]:
            """A change, the file whose checksums are then made anew, and how often they are."""
            roll = rng.random()
            if roll < 0.50:
                return json_change(rng, folder, MANIFEST), None, 0.85
            if roll < 0.66:
                file = rng.choice([*SEALED, SEALED[0], SEALED[0]])
                return json_change(rng, folder, file), file, 0.85
            if roll < 0.78:
                return json_change(rng, folder, DENSE) if rng.random() < 0.7 else dense(), DENSE, 0.85
            if roll < 0.93:
                file = rng.choice([DENSE, *[rng.choice(blobs)] * 2])
                return byte_change(rng, folder, file), file, 0.5
            return file_change(rng, rng.choice([MANIFEST, DENSE, *SEALED, *blobs])), None, 0.2

        change, file, share = part()
        return [change, *self._sealed(rng, file, share)]

    @staticmethod
    def _sealed(rng: Random, file: str | None, share: float) -> list[Change]:
        names = [file.removeprefix("pack/")] if file else []
        return [{"do": "seal", "file": MANIFEST, "sealed": names}] if rng.random() < share else []

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        return (models.seen_with_head if mutant.sample == HEAD else models.seen_of)(folder / "pack")

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        if np.array_equal(seen["logits"], whole["logits"]):
            return ""
        sealed = any(change["do"] == "seal" for change in mutant.changes)
        files = {str(c["file"]) for c in mutant.changes if c["do"] != "seal"}
        if not sealed:
            return "a file is not what the manifest says"
        if MANIFEST in files:
            return "the manifest says what its weights are not"
        if any(file.endswith(".bin") for file in files):
            return ""  # other blobs, and their checksums with them
        if mutant.sample in ("int4", *IMPORTED):
            return "" if models.finite(seen) else "the logits are not finite"
        if problem := models.contradiction(folder / "checkpoint"):
            return problem
        plain, why = models.plain_logits(self._explained(folder), seen["dtype"])
        if plain is None:
            return why
        if problem := models.differs(folder / "pack", seen, plain):
            return problem
        return "" if mutant.writes() or models.finite(seen) else "the logits are not finite"

    @staticmethod
    def _explained(folder: Path) -> Path:
        """A checkpoint with the pack's config and dense weights, and the experts that the pack was made of."""
        into, old = folder / "explained", folder / "checkpoint"
        shutil.copytree(old, into)
        experts: dict[str, Any] = {}
        for shard in old.glob("*.safetensors"):
            experts |= {name: t for name, t in load_file(shard).items() if ".experts." in name}
            (into / shard.name).unlink()
        (into / "model.safetensors.index.json").unlink()
        shutil.copy(folder / "pack" / "config.json", into)
        try:
            save_file(experts | load_file(folder / DENSE), into / "model.safetensors", {"format": "pt"})
        except Exception:
            shutil.copy(folder / DENSE, into / "model.safetensors")  # transformers will say what is wrong with it
        return into
