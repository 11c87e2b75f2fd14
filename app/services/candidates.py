"""Inspects one file or folder that may be a Mixture-of-Experts model, reading only headers and configs."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from core.errors import ModelError, MoestroError
from core.system.gguf import file_type, read_metadata
from core.system.gguf_parts import Parts, part_of, parts_in
from core.system.paths import expanded
from core.system.reading import INDEX_BYTES, read_json, reason, require_regular, shown
from core.system.text_config import text_config

log = logging.getLogger("moestro.app")
# limits: files per model, letters of a problem, letters of a format's name
MOST_FILES, MOST_LETTERS, LONGEST = 10_000, 500, 80
MANIFEST = "moestro.json"  # the file that makes a folder a pack, see docs/pack.md
REMOVED = f"{MANIFEST}.removed"  # ... and its name while the pack is deleted
PACK, DAMAGED, UNFINISHED, GGUF, PLAIN = "pack", "damaged pack", "unfinished", "GGUF", "safetensors"
METHODS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "compressed-tensors": "compressed-tensors",
    "bitsandbytes": "bitsandbytes",
    "fp8": "FP8",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt",
    "quark": "Quark",
    "mlx": "MLX",
    "hqq": "HQQ",
    "torchao": "torchao",
}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "num_selected_experts")
Where = Literal["packs", "cache", "folder", "hub"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the library. `layers` = MoE layers as far as a config tells; 0 = unknown, here and in the other
    counts."""

    name: str
    path: str
    where: Where
    kind: str  # pack, unfinished, safetensors, GPTQ, GGUF ...
    bytes: int = 0
    format: str = ""
    layers: int = 0
    experts: int = 0
    top_k: int = 0
    used: float = 0.0  # time of the last load, seconds since the epoch; 0 = never
    problem: str = ""  # why it cannot be used, as display text

    @property
    def can_open(self) -> bool:
        """Whether it can be loaded as it is."""
        return not self.problem and self.kind in (PACK, PLAIN)

    @property
    def can_delete(self) -> bool:
        """Whether it may be deleted from the library, after confirmation."""
        return self.where != "cache" and self.kind in (PACK, UNFINISHED)

    @property
    def can_import(self) -> bool:
        """Whether it can be imported into a pack."""
        return not self.problem and self.kind not in (PACK, DAMAGED, UNFINISHED)


def is_pack(model: str) -> bool:
    """Whether this is an expert pack, which has its own format and can keep experts on disk."""
    try:
        return model not in ("", "demo") and (expanded(model) / MANIFEST).is_file()
    except MoestroError:  # no path
        return False


def is_gone(model: str) -> bool:
    """Whether this is the path of a model that is no longer there; other files may be left in its folder."""
    try:
        path = expanded(model)
        there = path.is_file() or any((path / name).exists() for name in (MANIFEST, "config.json"))
        return path.is_absolute() and not there
    except (OSError, ValueError, MoestroError):  # no path at all
        return False


def look(path: Path, where: Where, name: str = "") -> Entry | None:
    """The entry for a path, or None if it is no Mixture-of-Experts model. An unreadable one gets a one-line `problem`;
    raises nothing."""
    entry = Entry(shown(name or path.name), shown(path), where, "")
    try:
        if entry.path != str(path):
            return replace(entry, kind="?", problem="Its name is not UTF-8 text. Rename it.")
        return _look(path, entry)
    except OSError as error:
        problem = f"{reason(error)}: {error.filename or path}"
    except (ValueError, MoestroError) as error:
        problem = str(error)
    except Exception as error:
        log.warning("%s was not understood", path, exc_info=True)
        problem = f"It cannot be understood ({type(error).__name__}: {error}). Get it again, or delete it."
    kind = GGUF if path.suffix == ".gguf" else DAMAGED if os.path.lexists(path / MANIFEST) else "?"
    return replace(entry, kind=kind, problem=one_line(problem))


def one_line(text: str) -> str:
    """A text as one line of bounded length, for lists."""
    return " ".join(shown(text).split())[:MOST_LETTERS]


def _look(path: Path, entry: Entry) -> Entry | None:
    if path.suffix == ".gguf" and not path.is_dir():
        return _gguf(path, entry)
    if path.suffix == ".partial":
        return _unfinished(path, entry) if any(path.glob("journal.jsonl*")) or (path / MANIFEST).exists() else None
    if os.path.lexists(path / REMOVED):
        return replace(
            entry, kind=PACK, bytes=_sum(path, "*"), problem="Its deletion was interrupted. Delete it again."
        )
    if os.path.lexists(path / MANIFEST):
        return _pack(path, entry)
    if os.path.lexists(path / "config.json"):
        return _checkpoint(path, entry)
    return None


def _pack(path: Path, entry: Entry) -> Entry:
    from core.memory.pack import check
    from core.memory.pack.contents import contents

    require_regular(path / MANIFEST, INDEX_BYTES)
    entry = replace(entry, kind=PACK, bytes=_sum(path, "*"))
    try:
        pack = check(path)
    except MoestroError as error:
        entry = replace(entry, problem=one_line(str(error)))
        try:
            contents(path)
        except ModelError:  # which files are its own is unknown
            return replace(entry, kind=DAMAGED)
        return entry
    return replace(entry, format=pack.format, layers=pack.layers - pack.heads, experts=pack.experts, top_k=pack.top_k)


def _unfinished(path: Path, entry: Entry) -> Entry:
    from core.memory.pack.contents import contents

    return replace(
        entry,
        name=entry.name.removesuffix(".partial"),
        kind=UNFINISHED,
        bytes=contents(path).bytes,
        problem="The import is not finished. Import the same model to the same folder again: it continues where "
        "it stopped. Or delete it.",
    )


def _checkpoint(path: Path, entry: Entry) -> Entry | None:
    config = read_json(path / "config.json", nonfinite=True)  # transformers writes Infinity into some configs
    if not isinstance(config, dict):
        raise ModelError("Its config.json is damaged. Download it again.")
    found = described(config, entry)
    return found and replace(found, bytes=_sum(path, "*.safetensors"), problem=_missing(path))


def described(config: Mapping[str, Any], entry: Entry) -> Entry | None:
    """What a config.json says of an entry; None if that is no Mixture-of-Experts model."""
    text = text_config(config)
    experts = _first(text, EXPERTS)
    if experts < 2:
        return None
    kind, format = _quantised(config)
    return replace(
        entry,
        kind=kind[:LONGEST],
        format=format[:LONGEST],
        layers=_layers(text),
        experts=experts,
        top_k=_first(text, TOP_K),
    )


def _quantised(config: Mapping[str, Any]) -> tuple[str, str]:
    """(kind, format) of a model folder."""
    stated = config.get("quantization_config")
    if not isinstance(stated, dict):
        return PLAIN, str(config.get("dtype") or config.get("torch_dtype") or "")
    method = str(stated.get("quant_method", "?"))
    bits = stated.get("bits") or (4 if stated.get("load_in_4bit") else 8 if stated.get("load_in_8bit") else None)
    group = stated.get("group_size") or stated.get("q_group_size")
    words = [f"{bits} bit" if bits else "", f"g{group}" if isinstance(group, int) and group > 0 else ""]
    return METHODS.get(method, method), ", ".join(filter(None, words)) or str(stated.get("format", method))


def _layers(config: Mapping[str, Any]) -> int:
    total, dense = _first(config, ("num_hidden_layers",)), _first(config, ("first_k_dense_replace",))
    only = config.get("mlp_only_layers")
    step = max(1, _first(config, ("decoder_sparse_step",)))
    return max(0, (total - dense - (len(only) if isinstance(only, list) else 0)) // step)


def _missing(path: Path) -> str:
    """What is wrong with the weight files of a folder, or ""."""
    index = path / "model.safetensors.index.json"
    if os.path.lexists(index):
        stated = read_json(index, INDEX_BYTES, nonfinite=True)
        files = stated.get("weight_map") if isinstance(stated, dict) else None
        wanted = sorted(set(map(str, files.values()))) if isinstance(files, dict) else []
        if not 0 < len(wanted) <= MOST_FILES:
            return f"{index.name} is damaged. Download it again."
        if absent := [name for name in wanted if not _there(path / name)]:
            return one_line(
                f"{len(absent)} of {len(wanted)} weight files are missing, {absent[0][:LONGEST]} first. "
                "Finish the download."
            )
    if not any(path.glob("*.safetensors")):
        return "It has no safetensors files. Finish the download, or get the model's safetensors version."
    return ""


def _gguf(path: Path, entry: Entry) -> Entry | None:
    part = part_of(path.name)
    if part and part.number != 1:
        return None  # listed under the first of its files
    stat = require_regular(path)
    head = _head(path, stat.st_mtime_ns, stat.st_size)
    arch = str(head.get("general.architecture", ""))
    experts = _first(head, (f"{arch}.expert_count",))
    if experts < 2:
        return None
    total, problem = stat.st_size, ""
    if part:
        there = _parts(path.parent, path.parent.stat().st_mtime_ns).get((part.stem, part.total), frozenset())
        total = sum(path.with_name(part.name(number)).stat().st_size for number in there)
        if len(there) < part.total:
            problem = f"{part.total - len(there)} of its {part.total} files are missing. Finish the download."
    return replace(
        entry,
        kind=GGUF,
        bytes=total,
        problem=problem,
        experts=experts,
        format=file_type(head["general.file_type"]) if "general.file_type" in head else "",
        layers=max(0, _first(head, (f"{arch}.block_count",)) - _first(head, (f"{arch}.leading_dense_block_count",))),
        top_k=_first(head, (f"{arch}.expert_used_count",)),
    )


@lru_cache(maxsize=8)
def _parts(folder: Path, modified: int) -> Parts:
    """The parts of split models in a folder, cached until files come or go."""
    return parts_in(folder)


@lru_cache(maxsize=256)
def _head(path: Path, modified: int, size: int) -> dict[str, Any]:
    """A GGUF file's metadata, cached until the file changes."""
    return read_metadata(path)


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((v for n in names if isinstance(v := values.get(n), int) and not isinstance(v, bool)), 0)


def _there(file: Path) -> bool:
    try:
        return file.exists()
    except OSError:  # a name that no file can have
        return False


def _sum(path: Path, pattern: str) -> int:
    """Sum of the file sizes in a folder, over a bounded number of files."""
    return sum(file.stat().st_size for file in islice(path.glob(pattern), MOST_FILES) if file.is_file())
