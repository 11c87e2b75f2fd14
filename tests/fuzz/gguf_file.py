"""GGUF files: numbers and names of the header, bytes of the tensors; imported, opened, and asked for logits."""

import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from core.importing import import_model
from tests.fuzz import models
from tests.fuzz.changes import Change, Gone, act, patch
from tests.fuzz.draw import byte_change, drawn, file_change
from tests.fuzz.gguf_fields import Fields, Place, read_fields, unsound
from tests.fuzz.mutant import Mutant
from tests.gguf_writer.write import experts_in, make_gguf
from tests.sources.test_gguf_head import made as with_gguf_head
from tests.tiny_tokenizer import save_tokenizer

FILE = "model.gguf"
WIDE = dict(hidden_size=256, intermediate_size=256, moe_intermediate_size=256)
WHOLE = (0, 1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
SAMPLES: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(kind="F32", norm_topk_prob=True),
    "mixtral": dict(kind="Q8_0"),
    "gpt_oss": dict(kind="MXFP4"),
}
MIXED = "mixed"  # qwen3_moe in types of GRIDS
HEAD = "glm4_moe"  # with one that predicts further tokens
GRIDS = {  # by tensor, where names say more: codes of i-quants and of k-quants, by matrix and by layer
    "blk.0.ffn_gate_exps": "IQ2_XS",
    "blk.0.ffn_up_exps": "IQ2_S",
    "blk.0.ffn_down_exps": "IQ3_XXS",
    "blk.1.ffn_down_exps": "Q6_K",
    "_exps.weight": "IQ1_S",
}


@act("field")
def set_field(file: Path, change: Mapping[str, Any]) -> None:
    """Another number, or other text of the same length, in a field of a GGUF header."""
    try:
        place = read_fields(file.read_bytes()).places[change["field"]]
    except (struct.error, ValueError, KeyError):
        raise Gone from None
    value = change["value"]
    if place.form == "text":
        patch(file, place.offset, bytes.fromhex(value)[: len(place.value)])
    else:
        patch(file, place.offset, packed(place.form, value))


def packed(form: str, value: Any) -> bytes:
    """A number in a field's own form: whole numbers wrap around, text stands for NaN and infinity."""
    if form == "<?":
        return bytes([int(value) & 255])
    if form in ("<f", "<d"):
        try:
            return struct.pack(form, float(value))
        except OverflowError:
            return struct.pack(form, float("inf"))
    return (int(value) % (1 << 8 * struct.calcsize(form))).to_bytes(struct.calcsize(form), "little")


def in_grids(name: str) -> str:
    """The type of a tensor."""
    return next((kind for part, kind in GRIDS.items() if part in name), "F32")


class GgufFiles:
    """The file itself explains other logits while it keeps the format's rules and names all it needs."""

    name = "gguf"
    samples = (*SAMPLES, MIXED, HEAD)

    def make(self, sample: str, folder: Path) -> None:
        if sample == HEAD:
            shutil.rmtree(with_gguf_head(sample, folder, experts_in("Q8_0"))[0])
            return
        made = dict(SAMPLES.get(sample, WIDE))
        choice = experts_in(made.pop("kind")) if sample != MIXED else in_grids
        sample = sample if sample != MIXED else "qwen3_moe"
        more: dict[str, Any] = {"general.alignment": 32, "general.name": "tiny", "tokenizer.ggml.model": "gpt2"}
        more |= tokens()
        small = models.SMALL | {"hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
        fields = small | models.SAMPLES[sample] | made
        if sample == "gpt_oss":
            fields["intermediate_size"] = 32
        checkpoint, _ = make_gguf(sample, folder, choice, more, **fields)
        shutil.rmtree(checkpoint)

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        fields = read_fields((folder / FILE).read_bytes())
        return drawn(
            rng,
            (0.75, lambda: self._field(rng, fields)),
            (0.10, lambda: byte_change(rng, folder, FILE, range(fields.end))),
            (0.12, lambda: byte_change(rng, folder, FILE)),
            (0.03, lambda: file_change(rng, FILE)),
        )

    def _field(self, rng: Random, fields: Fields) -> Change:
        """One field of the header; those of a long list of tokens are one group, so that others are drawn, too."""
        groups: dict[str, list[str]] = {}
        for name, place in fields.places.items():
            if place.form != "text" or place.value:
                groups.setdefault(re.sub(r"(value)\.\d+.*", r"\1.each", name), []).append(name)
        chosen = rng.choice(list(groups))
        if rng.random() < 0.4:
            chosen = rng.choice([g for g in groups if g.startswith("tensor.") and not g.endswith("length")])
        name = rng.choice(groups[chosen])
        return {"do": "field", "file": FILE, "field": name, "value": self._value(rng, fields, name)}

    @staticmethod
    def _value(rng: Random, fields: Fields, name: str) -> Any:
        place: Place = fields.places[name]
        if place.form == "text":
            texts = [
                p.value for n, p in fields.places.items() if p.form == "text" and n.endswith(name.rpartition(".")[2])
            ]
            alike = [text for text in texts if len(text) == len(place.value) and text != place.value]
            if alike and rng.random() < 0.6:
                return str(rng.choice(alike).hex())
            changed = bytearray(place.value)
            changed[rng.randrange(len(changed))] = rng.choice((0, 32, 46, 120, 255))
            return changed.hex()
        if place.form in ("<f", "<d"):
            return rng.choice(["nan", "inf", "-inf", 0.0, -1.0, 1e30, place.value * 2, -place.value, place.value + 1])
        if rng.random() < 0.4:
            return place.value + rng.choice((-1, 1, 32, -32, place.value))
        return rng.choice(WHOLE)

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        pack = import_model(str(folder / FILE), folder / "pack")
        return models.seen_of(pack) if mutant.sample != HEAD else models.seen_with_head(save_tokenizer(pack))

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        if np.array_equal(seen["logits"], whole["logits"]):
            return ""
        if problem := unsound(folder / FILE):
            return problem
        values = read_fields((folder / FILE).read_bytes())
        if problem := fewer(values):
            return problem
        return "" if models.finite(seen) or mutant.writes() else "the logits are not finite"


def fewer(fields: Fields) -> str:
    """Whether the metadata says fewer layers or experts than there are tensors of, and what."""
    arch = fields.values.get("general.architecture")
    layers = max((int(m[1]) + 1 for name in fields.tensors if (m := re.match(r"blk\.(\d+)\.", name))), default=0)
    experts = max((shape[2] for name, (shape, _, _) in fields.tensors.items() if "_exps.weight" in name), default=0)
    for what, there in (("block_count", layers), ("expert_count", experts)):
        said = fields.values.get(f"{arch}.{what}")
        if isinstance(said, int) and said < there:
            return f"{what} is {said}, there are tensors of {there}"
    return ""


def tokens() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer of 256 tokens."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": alphabet,
        "tokenizer.ggml.merges": ["a b", "c d"],
        "tokenizer.ggml.token_type": [1] * 256,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }
