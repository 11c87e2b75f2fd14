"""Checkpoint folders: config, index, headers and tensors, tokenizer, chat template, generation config."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from core.importing import import_model
from tests.fuzz import models
from tests.fuzz.changes import Change, read_document
from tests.fuzz.draw import NUMBERS, byte_change, drawn, file_change, header_bytes, json_change, value_near
from tests.fuzz.mutant import Mutant
from tests.mixed_widths import make_widths
from tests.mtp_checkpoint import with_head
from tests.tiny_tokenizer import save_tokenizer

HEAD = "head"
IMPORTED: dict[str, Callable[[Path], Path]] = {
    "widths": make_widths,
    HEAD: lambda folder: with_head("glm4_moe", folder),
}
JSON = {"config.json": 6, "generation_config.json": 2, "tokenizer_config.json": 2, "tokenizer.json": 2}
JSON["model.safetensors.index.json"] = 3
TEMPLATE = "chat_template.jinja"
TEMPLATES = (
    "{% for i in range(10000000000) %}x{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages[5].content }}",
    "{{ nothing.there }}",
    "{% for m in messages %}",
    "{{ 1 / 0 }}",
    "{{ 'x' * 1000000000 }}",
    "{{ raise_exception('no') }}",
    "{{ messages | tojson }}",
    "{{ ''.__class__.__mro__ }}",
    "{{ messages[0]['role'] }}",
    "{{ range(1000000000) | list }}",
    "{% set x = namespace(a=[]) %}{% for i in range(100000) %}{% set x.a = x.a + [i] %}{% endfor %}{{ x.a | length }}",
    "",
    "{{ strftime_now('%Y') and 'x' }}",
    "{% include 'x' %}",
    "{{ messages * 1000000 }}",
    "{{ lipsum(n=100000) }}",
    "{{ '%1000000000d' | format(1) }}",
)


class Checkpoints:
    """Loaded as they are, and compared with plain transformers on the same files; some imported: in codes of several
    widths, or with a head that predicts further tokens."""

    name = "checkpoint"
    samples = (*models.SAMPLES, *IMPORTED)

    def make(self, sample: str, folder: Path) -> None:
        if sample in IMPORTED:
            with tempfile.TemporaryDirectory() as made:
                shutil.copytree(save_tokenizer(IMPORTED[sample](Path(made))), folder, dirs_exist_ok=True)
        else:
            models.make_model(sample, folder)

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        shards = sorted(f.name for f in folder.glob("*.safetensors"))

        def shard() -> str:
            return rng.choice(shards)

        def header() -> Change:
            return byte_change(rng, folder, file := shard(), header_bytes(folder, file))

        return drawn(
            rng,
            (0.13, lambda: self._vital(rng, folder)),
            (0.47, lambda: json_change(rng, folder, rng.choices(list(JSON), list(JSON.values()))[0])),
            (0.12, lambda: json_change(rng, folder, shard())),
            (0.06, header),
            (0.06, lambda: byte_change(rng, folder, shard())),
            (0.04, lambda: byte_change(rng, folder, rng.choice(list(JSON)))),
            (0.06, lambda: {"do": "text", "file": TEMPLATE, "text": rng.choice(TEMPLATES)}),
            (0.06, lambda: file_change(rng, rng.choice([*JSON, *shards, TEMPLATE]))),
        )

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        if mutant.sample not in IMPORTED:
            return models.seen_of(folder)
        seen = models.seen_with_head if mutant.sample == HEAD else models.seen_of
        return seen(import_model(str(folder), folder / "pack"))

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        touched = {str(change.get("file")) for change in mutant.changes}
        if touched & {TEMPLATE, "tokenizer_config.json", "tokenizer.json"} and seen["chat ids"] != whole["chat ids"]:
            ids = models.plain_chat(folder)
            if ids is not None and ids != seen["chat ids"]:
                return f"transformers makes other ids of the chat: {ids}"
        if not any(name == "config.json" or "safetensors" in name for name in touched):
            return "" if np.array_equal(seen["logits"], whole["logits"]) else "the logits are others, but no weight is"
        if mutant.sample != HEAD and (problem := models.contradiction(folder)):
            return problem
        if not models.finite(seen) and not mutant.writes(".safetensors"):
            return "the logits are not finite"
        if mutant.sample in IMPORTED:
            return ""
        plain, why = models.plain_logits(folder, seen["dtype"])
        if plain is None:
            return "" if np.array_equal(seen["logits"], whole["logits"]) else why
        return models.differs(folder, seen, plain)

    @staticmethod
    def _vital(rng: Random, folder: Path) -> Change:
        """Another number for one of those that sizes and arithmetic come from."""
        config = read_document(folder / "config.json")
        numbers = [key for key, value in config.items() if isinstance(value, int | float | dict)]
        at: list[str | int] = [rng.choice(numbers)]
        if isinstance(config[at[0]], dict):
            return json_change(rng, folder, "config.json", at)
        raw = value_near(rng, config[at[0]]) if rng.random() < 0.5 else rng.choice(NUMBERS)
        return {"do": "set", "file": "config.json", "at": at, "raw": raw}
