"""Hub models: which files of a model are needed, and fetching them into this machine's Hugging Face cache.

Downloads require the user's consent, and never include pickles or code. Files downloaded once are found offline.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

from core.errors import ModelError
from core.hf.files import check_files
from core.importing.download import Remote, Unreachable, cache_folder, download, endpoint, list_files
from core.system.command import COMMAND
from core.system.gguf_parts import part_of

SHELL = ("*.json", "tokenizer*", "*.model", "*.tiktoken", "*.jinja", "merges.txt", "vocab.txt", "LICENSE*")
PICKLES = (".bin", ".pt", ".pth")
HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
NAME = r"[A-Za-z0-9][\w.-]*"
ADDRESS = re.compile(
    rf"(?:(?:https?://[^/]+|hf\.co|huggingface\.co)/)?({NAME}/{NAME}?)(?:/(?:tree|blob|resolve)/([^/:]+)(?:/([^:]*))?)?/?"
    r"(?::([^/:][^:]*))?"
)

Progress = Callable[[str, float, int, int], None]


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub. `wanted`: the name of a GGUF file, or of a quantization ("Q4_K_M"); "" = the safetensors."""

    repo: str
    revision: str = "main"
    wanted: str = ""

    @property
    def name(self) -> str:
        """Display name: without its owner."""
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        return self.repo + (f":{self.wanted}" if self.wanted else "")


def parse(text: str) -> HubModel | None:
    """Parse "org/name", "org/name:Q4_K_M", "org/name:file.gguf" or the URL of any of them; None = no hub id.

    Raises ModelError for a URL of another host than the hub's (or that of HF_ENDPOINT).
    """
    scheme, found, rest = text.strip().partition("://")
    host = rest.partition("/")[0].lower()
    known = (*HOSTS, endpoint().partition("://")[2].lower()) if found else ()
    if found and (scheme.lower() not in ("http", "https") or host not in known):
        raise ModelError(
            f"{host.rpartition('@')[2] or text!r} is not the Hugging Face hub. Models are downloaded from "
            "huggingface.co only: give org/name, or its address there."
        )
    match = ADDRESS.fullmatch(text.strip())
    if match is None or ("://" not in text and match[1].startswith((".", "~"))):
        return None
    return HubModel(match[1], match[2] or "main", match[4] or match[3] or "")


def look(model: HubModel) -> list[Remote]:
    """The files that an import needs, from the hub's file list. Raises ModelError when there are none, or the hub is
    unreachable."""
    try:
        files = list_files(model.repo, model.revision)
    except Unreachable as error:
        raise ModelError(by_hand(model, f"{error} ")) from error
    by_name = {file.name: file for file in files}
    return [by_name[name] for name in choose(model, by_name)]


def choose(model: HubModel, names: Iterable[str]) -> list[str]:
    """The needed files of a repository. Raises ModelError when the choice is ambiguous or nothing is readable."""
    names = sorted(names)
    weights = [n for n in names if n.endswith(".safetensors") and "/" not in n]
    if model.wanted or not weights:
        return _choose_gguf(model, names)
    if "model.safetensors" in weights:
        weights = ["model.safetensors"]
    elif "model.safetensors.index.json" in names:  # some repositories have a second copy under other names
        weights = [n for n in weights if n.startswith("model")]
    return [n for n in names if "/" not in n and any(fnmatch(n, pattern) for pattern in SHELL)] + weights


def gguf_sets(names: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models among files: the name of each as if it were one file -> its parts."""
    sets: dict[str, list[str]] = {}
    for name in names:
        if name.endswith(".gguf") and "mmproj" not in name.lower():
            part = part_of(name)
            sets.setdefault(f"{part.stem}.gguf" if part else name, []).append(name)
    return sets


def _choose_gguf(model: HubModel, names: list[str]) -> list[str]:
    """All parts of one GGUF model."""
    sets = gguf_sets(names)
    if not sets:
        if any(name.endswith(PICKLES) for name in names):
            raise ModelError(
                f"{model.repo} has its weights only as Python pickles (*.bin), which can run code when "
                "opened and are never read here. Choose a safetensors or GGUF version of the model."
            )
        raise ModelError(f"{model.repo} has neither safetensors nor GGUF files. Choose another version of the model.")
    wanted = model.wanted.lower()
    found = [
        whole
        for whole, parts in sets.items()
        if not wanted
        or wanted
        in (p.lower() for whole_or_part in (whole, *parts) for p in (whole_or_part, PurePosixPath(whole_or_part).name))
    ]
    found = found or [n for n in sets if re.search(rf"(?<![a-z0-9]){re.escape(wanted)}(?![a-z0-9_])", n.lower())]
    if len(found) != 1:
        what = f"no GGUF file {model.wanted!r}" if not found else f"{len(found)} GGUF files"
        raise ModelError(
            f"{model.repo} has {what}. Name one of them after a colon, as in {model.repo}:"
            f"{PurePosixPath(next(iter(sets))).name}. There are: "
            f"{', '.join(PurePosixPath(n).name for n in sets)}."
        )
    return sets[found[0]]


def fetch(model: HubModel, allowed: bool, progress: Progress, cancel: threading.Event | None) -> Path:
    """The model on this machine: a directory, or a GGUF file. Downloads what is missing, if `allowed`.

    Raises ModelError, which names the files to fetch by hand where this machine cannot; Cancelled. Downloaded bytes are
    kept, and a later call resumes there.
    """
    if not allowed:
        if (path := cached(model)) is not None:
            return path
        raise ModelError(
            f"There is no directory or file {str(model)!r} on this machine. If you mean a model on the hub, it is "
            f"downloaded only when you add --download."
        )
    try:
        files = look(model)
    except ModelError as error:
        if (path := cached(model)) is not None and isinstance(error.__cause__, Unreachable):
            return path
        raise
    try:
        paths = download(model.repo, model.revision, files, progress, cancel)
    except Unreachable as error:
        raise ModelError(
            f"The download of {model} broke off: {error} What has arrived is kept; run the same command to continue."
        ) from error
    return _entrance(paths)


def cached(model: HubModel) -> Path | None:
    """Path of a model that is complete in the Hugging Face cache; else None."""
    snapshot = snapshot_of(model)
    names = [p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*") if p.is_file()]
    try:
        paths = [snapshot / name for name in choose(model, names)]
        if paths[-1].suffix == ".gguf":
            part = part_of(paths[0].name)
            return paths[0] if len(paths) == (part.total if part else 1) else None
        check_files(snapshot)
    except ModelError:
        return None
    return snapshot


def snapshot_of(model: HubModel) -> Path:
    """Path of a model's files in the Hugging Face cache, whether or not it exists."""
    folder = cache_folder(model.repo)
    ref = folder / "refs" / model.revision
    return folder / "snapshots" / (ref.read_text(encoding="utf-8").strip() if ref.is_file() else model.revision)


def by_hand(model: HubModel, why: str) -> str:
    """Instructions for a manual download: which files, from where, and where to put them."""
    page, folder = f"{endpoint()}/{model.repo}/tree/{model.revision}", Path.cwd() / model.name
    if model.wanted:
        what = f"the GGUF file {model.wanted!r} (all of its parts)"
    else:
        index, weights = snapshot_of(model) / "model.safetensors.index.json", "all *.safetensors files"
        if index.is_file():
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            weights = ", ".join(sorted(shards))
        what = f"config.json, generation_config.json, all tokenizer files, model.safetensors.index.json and {weights}"
    start = folder if not model.wanted else folder / "FILE.gguf"
    return (
        f"{why}To fetch the model by hand, get {what} from {page}, put them into {folder}, and run: "
        f"{COMMAND} import {start}"
    )


def _entrance(paths: list[Path]) -> Path:
    """The path to open among a model's files."""
    gguf = [path for path in paths if path.suffix == ".gguf"]
    return min(gguf) if gguf else next(path.parent for path in paths if path.suffix == ".safetensors")
