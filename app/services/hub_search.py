"""Searches the hub for Mixture-of-Experts models that can be imported: what they are, their sizes, whether they fit.

A search asks the hub for names, and of each model found for its list of files and the beginning of one of them.
"""

import shutil
import struct
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from app.services.candidates import GGUF, METHODS, PLAIN, Entry, described
from core.errors import ModelError, MoestroError
from core.importing.download import MARGIN, Hit, Remote, Unreachable, cache_folder, find_models, list_files, read_head
from core.importing.hub import HubModel, choose, gguf_sets
from core.system.memory_limits import host_memory
from core.system.reading import BadJson, parse_json
from core.system.text_config import text_config
from core.system.wording import format_bytes

HITS = 24  # models that are looked at, the most downloaded ones
TOGETHER = 8  # requests at a time
HEAD = 64 << 10  # bytes of a GGUF file, which has its sizes before its vocabulary
CONFIG = 1 << 20  # bytes of a config.json
FEWEST = 2  # characters of a search
NOT_ALLOWED = "Tick Allow download: a search asks the Hugging Face hub for models."


@dataclass(frozen=True, slots=True)
class Found:
    """A model on the hub, or one of the files of a repository. `entry.path` is what an import calls it, `entry.bytes`
    what is downloaded."""

    entry: Entry
    repo: str
    downloads: int
    gated: bool


def search(text: str, *, allowed: bool) -> list[Found]:
    """The models with a name like `text` that an import can read, the most downloaded first. Raises MoestroError, also
    where downloads are not `allowed`."""
    text = text.strip()
    if not allowed:
        raise MoestroError(NOT_ALLOWED)
    if len(text) < FEWEST:
        raise MoestroError("Write a part of the model's name, as in Qwen3-30B.")
    try:
        hits = find_models(text, HITS)
        with ThreadPoolExecutor(TOGETHER, "moestro-hub") as pool:
            return [one for found in pool.map(_look, hits) for one in found]
    except Unreachable as error:
        raise MoestroError(f"{error} Models on this machine can be imported without it.") from error


def fits(bytes: int, packs: Path) -> tuple[bool, str]:
    """Whether a download of so many bytes has room on the disks, with the pack that is made of it, and in words what
    this machine has for it."""
    cache, memory = _existing(cache_folder("a/b")), host_memory().available
    packs = _existing(packs)
    need = bytes * (1 + (cache.stat().st_dev == packs.stat().st_dev)) + MARGIN
    if need > (free := shutil.disk_usage(cache).free) or bytes + MARGIN > (free := shutil.disk_usage(packs).free):
        return False, f"Does not fit on the disk: needs {format_bytes(need)} with its pack, {format_bytes(free)} free"
    if bytes > memory:
        return True, f"Larger than the {format_bytes(memory)} of free memory: experts are read from disk"
    return True, f"Fits into memory: {format_bytes(memory)} free"


def _look(hit: Hit) -> list[Found]:
    """What of a repository can be imported; nothing where that is not known."""
    try:
        files = list_files(hit.repo, "main")
        names = {file.name: file for file in files}
        if any(name.endswith(".safetensors") and "/" not in name for name in names):
            found = _checkpoint(hit, names)
        else:
            found = _ggufs(hit, names)
    except (ModelError, BadJson, struct.error, UnicodeDecodeError):  # gated, or nothing that is read here
        return []
    return [Found(one, hit.repo, hit.downloads, hit.gated) for one in found]


def _checkpoint(hit: Hit, names: dict[str, Remote]) -> list[Entry]:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    config = parse_json(read_head(hit.repo, "main", "config.json", CONFIG).decode(), nonfinite=True)
    entry = described(config, Entry(hit.repo, hit.repo, "hub", "")) if isinstance(config, dict) else None
    if entry is None or entry.kind not in (PLAIN, *METHODS.values()):
        return []
    if not {config.get("model_type"), text_config(config).get("model_type")} & set(CONFIG_MAPPING_NAMES):
        return []  # runs with code of its own only
    return [replace(entry, bytes=_bytes(names, choose(HubModel(hit.repo), names)))]


def _ggufs(hit: Hit, names: dict[str, Remote]) -> list[Entry]:
    """One for each GGUF model of a repository, the smallest first."""
    from core.importing.sources.gguf.architectures import ARCHITECTURES

    sets = gguf_sets(sorted(names))
    if not sets:
        return []
    head = read_head(hit.repo, "main", next(iter(sets.values()))[0], HEAD)
    name = _key(head, "general.architecture")
    at = 12  # its type, and the length of the text
    architecture = name[at : at + struct.unpack_from("<Q", name, 4)[0]].decode() if name else ""
    experts, top_k, layers = (
        struct.unpack_from("<I", value, 4)[0] if (value := _key(head, f"{architecture}.{key}")) else 0
        for key in ("expert_count", "expert_used_count", "block_count")
    )
    if architecture not in ARCHITECTURES or experts < 2:
        return []
    found = [
        Entry(
            PurePosixPath(whole).stem,
            f"{hit.repo}:{PurePosixPath(whole).name}",
            "hub",
            GGUF,
            _bytes(names, parts),
            architecture,
            layers,
            experts,
            top_k,
        )
        for whole, parts in sets.items()
    ]
    return sorted(found, key=lambda one: one.bytes)


def _key(head: bytes, name: str) -> bytes:
    """What follows a key among the first bytes of a GGUF file: the type of its value, four bytes, and the value; empty
    where there is no such key."""
    mark = struct.pack("<Q", len(name)) + name.encode()
    at = head.find(mark)
    return head[at + len(mark) : at + len(mark) + 256] if at >= 0 else b""


def _bytes(names: dict[str, Remote], chosen: Iterable[str]) -> int:
    return sum(names[name].bytes for name in chosen)


def _existing(folder: Path) -> Path:
    return next(one for one in (folder, *folder.parents) if one.exists())
