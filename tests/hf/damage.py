"""Ways to damage the files of a checkpoint: each takes its folder and changes one thing."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Change = Callable[[Path], object]
Tensors = dict[str, torch.Tensor]
INDEX = "model.safetensors.index.json"


def shards(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def removed(pattern: str) -> Change:
    return lambda path: [file.unlink() for file in path.glob(pattern)]


def only_pickles(path: Path) -> None:
    removed("*.safetensors*")(path)
    (path / "pytorch_model.bin").write_bytes(b"x")


def cut(number: int, end: int) -> Change:
    return lambda path: shards(path)[number].write_bytes(shards(path)[number].read_bytes()[:end])


def tensors(change: Callable[[Tensors], Tensors]) -> Change:
    return lambda path: [save_file(change(load_file(file)), file, said(file)) for file in shards(path)]


def said(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return opened.metadata() or {"format": "pt"}


def headers(change: Callable[[dict[str, str]], dict[str, str]]) -> Change:
    return lambda path: [save_file(load_file(file), file, change(said(file))) for file in shards(path)]


def without(fragment: str) -> Change:
    return tensors(lambda t: {n: v for n, v in t.items() if fragment not in n} or {"unused": torch.zeros(1)})


def joined(path: Path) -> None:
    whole = {name: tensor for file in shards(path) for name, tensor in load_file(file).items()}
    (path / INDEX).unlink()
    save_file(whole, path / "model.safetensors", {"format": "pt"})


def config(**changes: Any) -> Change:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def text(name: str, content: str) -> Change:
    return lambda path: (path / name).write_text(content)


def index(change: Callable[[dict[str, str]], object]) -> Change:
    def changed(path: Path) -> None:
        file = path / INDEX
        content = json.loads(file.read_text())
        change(content["weight_map"])
        file.write_text(json.dumps(content))

    return changed


def header(change: Callable[[dict[str, Any], str], str | None]) -> Change:
    """Rewrite the first shard's header; `change` gets it and its first tensor's name, and may return its text."""

    def changed(path: Path) -> None:
        file = shards(path)[0]
        raw = file.read_bytes()
        end = 8 + int.from_bytes(raw[:8], "little")
        content = json.loads(raw[8:end])
        name = next(n for n in content if n != "__metadata__")
        made = (change(content, name) or json.dumps(content)).encode()
        file.write_bytes(len(made).to_bytes(8, "little") + made + raw[end:])

    return changed


def entry(**changes: Any) -> Change:
    return header(lambda content, name: content[name].update(changes))


def repeated(content: dict[str, Any], name: str) -> str:
    whole = json.dumps(content)
    return whole[:-1] + f", {json.dumps(name)}: {json.dumps(content[name])}}}"


def overlapping(content: dict[str, Any], name: str) -> None:
    other = next(
        n for n, at in content.items() if n not in (name, "__metadata__") and at["shape"] == content[name]["shape"]
    )
    content[other]["data_offsets"] = content[name]["data_offsets"]


def both_shards(path: Path) -> None:
    first, second, *_ = shards(path)
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor + 1}, second, metadata={"format": "pt"})


def reshaped(fragment: str, shape: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return tensors(lambda t: {n: shape(v).contiguous() if fragment in n else v for n, v in t.items()})


def loop(name: str) -> Change:
    def change(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        try:
            (path / name).symlink_to(name)
        except OSError:
            pytest.skip("this system lets nobody make links")

    return change


def pipe(name: str) -> Change:
    def change(path: Path) -> None:
        if not hasattr(os, "mkfifo"):
            pytest.skip("this system has no named pipes")
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return change


def renamed(mapping: dict[str, str], to: str) -> None:
    mapping[next(iter(mapping))] = to


def header_length(path: Path, length: int) -> None:
    file = shards(path)[0]
    file.write_bytes(length.to_bytes(8, "little") + file.read_bytes()[8:])


def vocabulary_entry(path: Path, value: Any) -> None:
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"] = dict.fromkeys(content["model"]["vocab"], value)
    file.write_text(json.dumps(content))
