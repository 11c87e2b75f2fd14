"""Checkpoint folders: config, index, headers and tensors, tokenizer, chat template, generation config."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tests.fuzz import models
from tests.fuzz.changes import Change, read_document
from tests.fuzz.draw import NUMBERS, byte_change, file_change, header_bytes, how_many, json_change, value_near
from tests.fuzz.mutant import Mutant

JSON = {
    "config.json": 10,
    "generation_config.json": 2,
    "tokenizer_config.json": 2,
    "tokenizer.json": 2,
    "model.safetensors.index.json": 3,
}
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
    """Loaded as they are, and compared with plain transformers on the same files."""

    name = "checkpoint"
    samples = tuple(models.SAMPLES)

    def make(self, sample: str, folder: Path) -> None:
        models.make_model(sample, folder)

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        shards = sorted(f.name for f in folder.glob("*.safetensors"))
        changes = []
        for _ in range(how_many(rng)):
            shard, roll = rng.choice(shards), rng.random()
            if roll < 0.60:
                file = rng.choices(list(JSON), list(JSON.values()))[0]
                if file == "config.json" and rng.random() < 0.4:
                    changes.append(self._vital(rng, folder))
                else:
                    changes.append(json_change(rng, folder, file))
            elif roll < 0.72:
                changes.append(json_change(rng, folder, shard))
            elif roll < 0.78:
                changes.append(byte_change(rng, folder, shard, header_bytes(folder, shard)))
            elif roll < 0.84:
                changes.append(byte_change(rng, folder, shard))
            elif roll < 0.88:
                changes.append(byte_change(rng, folder, rng.choice(list(JSON))))
            elif roll < 0.94:
                changes.append({"do": "text", "file": TEMPLATE, "text": rng.choice(TEMPLATES)})
            else:
                changes.append(file_change(rng, rng.choice([*JSON, *shards, TEMPLATE])))
        return changes

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        return models.seen_of(folder)

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        touched = {str(change.get("file")) for change in mutant.changes}
        if touched & {TEMPLATE, "tokenizer_config.json", "tokenizer.json"} and seen["chat ids"] != whole["chat ids"]:
            ids = models.plain_chat(folder)
            if ids is not None and ids != seen["chat ids"]:
                return f"transformers makes other ids of the chat: {ids}"
        if not any(name == "config.json" or "safetensors" in name for name in touched):
            return "" if np.array_equal(seen["logits"], whole["logits"]) else "the logits are others, but no weight is"
        if problem := models.contradiction(folder):
            return problem
        if not models.finite(seen) and not self._weights_changed(mutant, folder):
            return "the logits are not finite"
        plain, why = models.plain_logits(folder, seen["dtype"])
        if plain is None:
            return "" if np.array_equal(seen["logits"], whole["logits"]) else why
        if plain.shape == seen["logits"].shape and np.array_equal(plain, seen["logits"], equal_nan=True):
            return ""
        return "transformers computes other logits"

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

    @staticmethod
    def _weights_changed(mutant: Mutant, folder: Path) -> bool:
        """Whether bytes behind a header were written to."""
        return any(
            str(c.get("file")).endswith(".safetensors") and c["do"] in ("flip", "write", "zero") for c in mutant.changes
        )
