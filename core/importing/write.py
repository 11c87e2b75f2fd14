"""Executes an import: dense weights, then the experts, one file per layer, then the manifest."""

import errno
import os
import shutil
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from core import __version__
from core.errors import ModelError
from core.importing.job import ImportPlan, free_bytes
from core.memory.pack import Manifest, PackWriter
from core.memory.pack.manifest import DENSE, layer_file
from core.memory.store import Cancelled
from core.system.wording import format_bytes

SPARE = 16 << 20  # bytes: config, tokenizer, manifest and file system overhead
IN_FLIGHT = 384 << 20  # maximum bytes of experts being encoded at a time (but always one expert)

Encoded = tuple[torch.Tensor, dict[str, str]]


def write_pack(
    job: ImportPlan, out: Path, progress: Callable[[str, float, int, int], None], cancel: threading.Event | None
) -> Path:
    """Write what is missing of a pack and publish it. Raises ModelError, Cancelled."""
    try:
        with PackWriter(out, job.identity(__version__)) as writer:
            if writer.complete:
                return writer.publish()
            done = sum(entry.entry.bytes for entry in writer.finished.values())
            check_space(job, out, done)
            return Work(job, writer, progress, cancel).run()
    except OSError as error:
        raise ModelError(failed(out, error)) from error


def check_space(job: ImportPlan, out: Path, done: int) -> None:
    """Raises ModelError when the disk has too little room for the bytes still to be written."""
    shell = sum(file.stat().st_size for file in job.shell.iterdir())
    need, free = job.bytes - done + shell + SPARE, free_bytes(out.parent)
    if need > free:
        raise ModelError(
            f"The pack needs {format_bytes(need)} more disk space, but only {format_bytes(free)} are free in "
            f"{out.parent}: {format_bytes(need - free)} are missing. Delete something, choose a directory on "
            "another disk (--out), or a smaller expert format."
        )


def failed(out: Path, error: OSError) -> str:
    """Error text for a write that the system refuses."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return (
            f"There is no room left for {out} ({error.strerror}). Make room and run the same import again: it "
            f"continues where it stopped."
        )
    return (
        f"{out} cannot be written: {error.strerror or error}. Check the disk and your permissions, or choose "
        "another directory."
    )


class Work:
    """One running import."""

    def __init__(
        self,
        job: ImportPlan,
        writer: PackWriter,
        progress: Callable[[str, float, int, int], None],
        cancel: threading.Event | None,
    ) -> None:
        self._job, self._writer, self._progress, self._cancel = job, writer, progress, cancel
        self._done = 0
        self._text = ""

    def run(self) -> Path:
        """Write config and tokenizer, dense weights, layers, manifest."""
        job, writer = self._job, self._writer
        for file in job.shell.iterdir():
            shutil.copyfile(file, writer.directory / file.name)
        self._step("Writing dense weights")
        if DENSE in writer.finished:
            self._wrote(job.dense_bytes)
        else:
            writer.write_dense(job.dense, self._dense, self._wrote)
        for layer in range(job.layers):
            self._step(f"Writing experts, layer {layer + 1} of {job.layers}")
            if (known := writer.finished.get(layer_file(layer))) is not None:
                self._wrote(known.entry.bytes)
                continue
            origins: Counter[tuple[str, str]] = Counter()
            writer.write_layer(layer, self._blobs(layer, origins), self._wrote, partial(noted, origins))
        self._step("Finishing")
        return writer.publish(self._manifest())

    def _step(self, text: str) -> None:
        self._text = text
        self._wrote(0)

    def _wrote(self, size: int) -> None:
        if self._cancel is not None and self._cancel.is_set():
            raise Cancelled
        self._done += size
        self._progress(self._text, min(1.0, self._done / self._job.bytes), self._done, self._job.bytes)

    def _dense(self, name: str) -> torch.Tensor:
        try:
            return self._job.source.tensors.read(name)
        except OSError as error:
            raise ModelError(
                f"{self._job.source.path} cannot be read: {error.strerror or error}. Check the disk."
            ) from None

    def _blobs(self, layer: int, origins: Counter[tuple[str, str]]) -> Iterator[torch.Tensor]:
        """A layer's encoded experts in order, a few of them encoded concurrently."""
        job = self._job
        fp32 = 4 * sum(torch.Size(s.shape).numel() for s in job.site.parts.values())
        width = max(1, min(os.cpu_count() or 1, 8, IN_FLIGHT // (3 * fp32)))
        running: deque[Future[Encoded]] = deque()
        todo = iter(range(job.site.num_experts))
        with ThreadPoolExecutor(width, "moestro-import") as pool:
            try:
                while True:
                    while len(running) <= width and (expert := next(todo, None)) is not None:
                        running.append(pool.submit(job.encode, layer, expert))
                    if not running:
                        return
                    blob, how = running.popleft().result()
                    origins.update(how.items())
                    yield blob
            finally:
                pool.shutdown(cancel_futures=True)

    def _manifest(self) -> Manifest:
        job, writer = self._job, self._writer
        layers = [writer.finished[layer_file(layer)] for layer in range(job.layers)]
        return Manifest(
            model_hash=job.hash,
            kinds=tuple(job.kinds.values()),
            kind_of=tuple(job.codecs.distinct.index(codec) for codec in job.codecs),
            numbers=job.numbers,
            layers=job.layers,
            experts=job.site.num_experts,
            top_k=job.site.top_k,
            parts=job.site.parts,
            is_transposed=job.site.is_transposed,
            has_gate=job.site.has_gate,
            is_concatenated=job.site.is_concatenated,
            files=writer.entries(),
            sums=tuple(layer.sums for layer in layers),
            source=job.facts,
            exact=exactness([layer.notes for layer in layers]),
            moestro=__version__,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            heads=job.heads,
        )


def noted(origins: Counter[tuple[str, str]]) -> dict[str, str]:
    """Origin by part of one layer: a single one, or all that occur, most frequent first."""
    parts: dict[str, list[str]] = {}
    for (part, text), _ in sorted(origins.items(), key=lambda item: (-item[1], item[0])):
        parts.setdefault(part, []).append(text)
    return {part: " / ".join(texts) for part, texts in parts.items()}


def exactness(layers: list[Mapping[str, str]]) -> dict[str, str]:
    """By part, over all layers: "exact codes", or "exact codes (20 layers), requantised from Q6_K (4 layers)"."""
    found: dict[str, str] = {}
    for part in layers[0]:
        counts = Counter(notes[part] for notes in layers)
        found[part] = (
            next(iter(counts))
            if len(counts) == 1
            else ", ".join(f"{text} ({n} layer{'s' if n > 1 else ''})" for text, n in counts.most_common())
        )
    return found
