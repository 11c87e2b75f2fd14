"""Import: converts a checkpoint of any supported kind to an expert pack, tensor by tensor.

At most one dense tensor or a few experts are in memory at a time, however large the model.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from core.errors import ModelError
from core.hf.files import model_path
from core.importing.forecast import ImportForecast, make_forecast
from core.importing.hub import HubModel, cached, fetch, look, parse
from core.importing.job import open_job
from core.importing.write import write_pack
from core.memory.codec.formats import label_of
from core.system.paths import expanded

__all__ = ["HubModel", "ImportForecast", "Progress", "forecast_import", "import_model", "look", "missing", "parse"]

Progress = Callable[[str, float, int, int], None]
"""progress(what is done now, share 0..1, bytes done, bytes in all); a download and the import count from 0 each."""

Where = Path | Callable[[str, str], Path]
"""A directory, or what makes one of a model's name and its format."""


def import_model(
    source: str,
    out: Where,
    *,
    format: str = "auto",
    blocks: int = 1,
    head: bool = True,
    progress: Progress = lambda text, share, done, total: None,
    cancel: threading.Event | None = None,
    download: bool = False,
    planned: Callable[[ImportForecast], None] | None = None,
) -> Path:
    """Import `source` into a new directory `out`, and return that.

    `source`: a model directory, a GGUF file, "demo", or a hub id ("org/name", "org/name:Q4_K_M"), which is downloaded
    only with `download`. `format`: a name of FORMATS, or "auto": the format of the checkpoint's experts. `blocks`:
    equal parts that every expert is stored in, one after the other, so that each can be read alone. `head`: with the
    checkpoint's head that predicts further tokens, if it has one of a known kind. `planned` gets the forecast before
    anything is written; without it none is made.

    Peak memory: the dense weights + 1 GB at most. Raises ModelError or SettingError with the remedy, Cancelled when
    `cancel` is set: what is finished by then stays in `<out>.partial`, and the same call resumes there.
    """
    if isinstance(out, Path):
        refuse_existing(out)
    path, hub = model_path(source), parse(source)
    name = "demo" if source == "demo" else name_of(path)
    if hub is not None and not path.exists():
        path, name = fetch(hub, download, progress, cancel), hub.name
    with open_job(path, name, format, blocks, head) as job:
        directory = out if isinstance(out, Path) else out(name, label_of(job.formats))
        refuse_existing(directory)
        if planned is not None:
            planned(make_forecast(job))
        return write_pack(job, Path(os.path.abspath(expanded(directory))), progress, cancel)


def forecast_import(source: str, format: str = "auto") -> ImportForecast | None:
    """What `import_model` would make of a source; None where that has to be downloaded first. Raises as it does."""
    path, hub = model_path(source), parse(source)
    if hub is not None and not path.exists():
        found = cached(hub)
        if found is None:
            return None
        path = found
    with open_job(path, name_of(path), format, 1) as job:
        return make_forecast(job)


def missing(source: str) -> HubModel | None:
    """The model that has to be downloaded first, if `source` names one that is not on this machine."""
    model = parse(source)
    return model if model is not None and not model_path(source).exists() and cached(model) is None else None


def refuse_existing(out: Path) -> None:
    """Raises ModelError when `out` already exists."""
    if expanded(out).exists():
        raise ModelError(
            f"{out} exists already, and nothing is ever overwritten. Choose another directory (--out), or "
            "delete it first."
        )


def name_of(path: Path) -> str:
    """A local model's display name, without its path."""
    whole = Path(os.path.abspath(path))
    return whole.stem if whole.suffix == ".gguf" else whole.name
