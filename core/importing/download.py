"""Downloads hub files into the Hugging Face cache. Large ones resume at the byte where an earlier download stopped.

Small files go through huggingface_hub. It restarts an interrupted file from the beginning, which can cost hours for a
model, so files with a known sha256 are streamed here into the cache's `blobs/<sha256>`, where huggingface_hub then
finds them.
"""

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from core.errors import ModelError
from core.memory.store import Cancelled
from core.system.wording import format_bytes

CHUNK = 1 << 20  # bytes read from the network at a time
TRIES = 5  # consecutive attempts without any bytes
PAUSE = 1.0  # seconds before the next attempt, times their number
TIMEOUT = 60.0  # seconds without a byte
MARGIN = 256 << 20  # disk space left free
FULL = (errno.ENOSPC, errno.EDQUOT)  # of an OSError

Progress = Callable[[str, float, int, int], None]


class Unreachable(Exception):
    """The hub does not answer, or not as expected; the text describes the problem in a sentence."""


class Remote(NamedTuple):
    """A file on the hub: size in bytes, and its sha256 where the hub states one (large files)."""

    name: str
    bytes: int
    sha256: str


class Hit(NamedTuple):
    """A model that a search found. `gated`: its files are for those who have accepted its terms."""

    repo: str
    downloads: int
    gated: bool


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT, or the default."""
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def cache_folder(repo: str) -> Path:
    """The Hugging Face cache's folder for a model repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def find_models(text: str, most: int) -> list[Hit]:
    """The models whose names have a text, most downloaded first. Raises Unreachable."""
    from huggingface_hub import HfApi

    with _hub(text):
        found = HfApi(endpoint()).list_models(search=text, sort="downloads", limit=most, expand=["downloads", "gated"])
        return [Hit(one.id, int(one.downloads or 0), bool(one.gated)) for one in found]


def read_head(repo: str, revision: str, name: str, most: int) -> bytes:
    """The first bytes of a file on the hub, at most so many. Raises ModelError, Unreachable."""
    from huggingface_hub import hf_hub_url, utils

    hub: Any = utils
    headers = {**hub.build_hf_headers(), "Range": f"bytes=0-{most - 1}", "Accept-Encoding": "identity"}
    url, head = hf_hub_url(repo, name, revision=revision, endpoint=endpoint()), bytearray()
    with _hub(repo), hub.get_session().stream("GET", url, headers=headers, follow_redirects=True) as response:
        hub.hf_raise_for_status(response)
        for chunk in response.iter_bytes(most):
            head += chunk
            if len(head) >= most:
                break
    return bytes(head[:most])


def list_files(repo: str, revision: str) -> list[Remote]:
    """Every file of a repository. Raises ModelError when the model does not exist, Unreachable."""
    from huggingface_hub import HfApi

    with _hub(repo, revision):
        found = HfApi(endpoint()).model_info(repo, revision=revision, files_metadata=True).siblings or []
    return [Remote(f.rfilename, int(f.size or 0), str(f.lfs.sha256) if f.lfs else "") for f in found]


@contextmanager
def _hub(repo: str, revision: str = "main") -> Iterator[None]:
    """Requests about a repository: what the hub says against them becomes a ModelError, other failures Unreachable."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if constants.HF_HUB_OFFLINE:
        raise Unreachable("This machine is set to work offline (HF_HUB_OFFLINE).")
    try:
        yield
    except (Cancelled, ModelError, Unreachable):
        raise
    except GatedRepoError:
        raise ModelError(
            f"{repo} is a gated model. Accept its terms at {endpoint()}/{repo}, run `hf auth login`, and try again."
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"There is no model {repo!r} at {endpoint()}, and no such directory here. Check the name; for "
            "a private model run `hf auth login` first."
        ) from None
    except RevisionNotFoundError:
        raise ModelError(f"{repo} has no version {revision!r}. Leave it out, or check it.") from None
    except Exception as error:  # depends on the network library of this huggingface_hub
        if isinstance(error, OSError) and error.errno in FULL:
            raise ModelError(
                f"The disk of the Hugging Face cache ({cache_folder(repo).parent}) is full. What has arrived is kept: "
                "make room, and start again."
            ) from error
        raise Unreachable(f"The hub at {endpoint()} cannot be reached ({_brief(error)}).") from error


def download(
    repo: str, revision: str, files: list[Remote], progress: Progress, cancel: threading.Event | None
) -> list[Path]:
    """Download the files that are not yet in the cache. Returns the paths of all.

    Raises ModelError when the disk is full or a file arrives damaged, Unreachable, Cancelled.
    """
    from huggingface_hub import hf_hub_download

    blobs = cache_folder(repo) / "blobs"
    total, done = sum(file.bytes for file in files), 0
    missing = sum(f.bytes - _have(blobs, f) for f in files)
    _check_space(blobs, missing)
    paths = []
    for file in files:

        def arrived(size: int, file: Remote = file, before: int = done) -> None:
            if cancel is not None and cancel.is_set():
                raise Cancelled
            progress(f"Downloading {file.name}", min(1.0, (before + size) / max(total, 1)), before + size, total)

        arrived(0)
        with _hub(repo, revision):
            if file.sha256 and not (blobs / file.sha256).exists():
                _stream(repo, revision, file, blobs, arrived)
            path = Path(
                hf_hub_download(repo, file.name, revision=revision, endpoint=endpoint(), cache_dir=blobs.parents[1])
            )
        if file.sha256 and not path.is_symlink():  # no symlinks on this file system: it was copied
            (blobs / file.sha256).unlink(missing_ok=True)
        done += file.bytes
        paths.append(path)
    progress("Downloaded", 1.0, total, total)
    return paths


def _have(blobs: Path, file: Remote) -> int:
    """Bytes of a file that are already on this machine."""
    for there in (blobs / file.sha256, blobs / f"{file.sha256}.part") if file.sha256 else ():
        if there.exists():
            return min(there.stat().st_size, file.bytes)
    return 0


def _check_space(blobs: Path, missing: int) -> None:
    free = shutil.disk_usage(next(p for p in blobs.parents if p.exists())).free
    if missing + MARGIN > free:
        raise ModelError(
            f"The download needs {format_bytes(missing)}, but only {format_bytes(free)} are free where the Hugging "
            f"Face cache is ({blobs.parents[1]}): {format_bytes(missing + MARGIN - free)} are missing. Make room, or "
            "set HF_HOME to a directory on another disk."
        )


def _stream(repo: str, revision: str, file: Remote, blobs: Path, arrived: Callable[[int], None]) -> None:
    """Download one large file to `blobs/<sha256>`, resuming an earlier attempt."""
    blobs.mkdir(parents=True, exist_ok=True)
    part = blobs / f"{file.sha256}.part"
    tries, last = 0, ""
    while (size := part.stat().st_size if part.exists() else 0) < file.bytes:
        if tries == TRIES:
            raise Unreachable(f"{file.name} stopped at {format_bytes(size)} of {format_bytes(file.bytes)} ({last}).")
        try:
            _append(repo, revision, file, part, arrived)
            last = "the connection was closed"
        except (Cancelled, ModelError, OSError):
            raise
        except Exception as error:
            last = _brief(error)
        if part.exists() and part.stat().st_size > size:
            tries = 0
        else:
            tries += 1
            time.sleep(tries * PAUSE)
    digest = hashlib.sha256()
    with part.open("rb") as handle:
        while chunk := handle.read(CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != file.sha256:
        part.unlink()
        raise ModelError(f"{file.name} arrived damaged and was deleted. Run the same command to fetch it again.")
    os.replace(part, blobs / file.sha256)


def _append(repo: str, revision: str, file: Remote, part: Path, arrived: Callable[[int], None]) -> None:
    """Append the missing bytes of a file, until it is complete or the connection fails."""
    from huggingface_hub import hf_hub_url, utils

    hub: Any = utils
    size = part.stat().st_size if part.exists() else 0
    headers = {**hub.build_hf_headers(), "Range": f"bytes={size}-", "Accept-Encoding": "identity"}
    url = hf_hub_url(repo, file.name, revision=revision, endpoint=endpoint())
    with hub.get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=TIMEOUT) as response:
        hub.hf_raise_for_status(response)
        if response.status_code != 206:  # the server sent the whole file instead of a range
            size = 0
        with part.open("r+b" if part.exists() else "wb") as handle:
            handle.truncate(size)
            handle.seek(size)
            for chunk in response.iter_bytes(CHUNK):
                handle.write(chunk)
                size += len(chunk)
                arrived(size)


def _brief(error: Exception) -> str:
    """A network library's error on one short line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
