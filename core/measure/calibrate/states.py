"""The estimator's training data: what it is fed, and the routing it is to predict, of a uniform sample of tokens."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from core.errors import ProfileError
from core.hf.discover import ExpertsSite
from core.hf.norms import has_quasi_hidden, quasi_hidden
from core.measure.calibrate.state_file import Records, StateFile
from core.runtime.measurement import LayerRun
from core.settings.calibration import CalibrationSettings
from core.system.wording import format_bytes
from core.types import ModelShape

SEED = 0
HELD_OUT = 10  # one token in this many is not trained on, but used for testing
SPARE_BYTES = 256 << 20  # of the disk, left for others


class States:
    """Reads passes, and writes one record a layer but the first for each token of the sample: `train`, and `test` for
    one token in HELD_OUT.

    For the quasi-hidden state the residual stream, the experts and their weights are written: default vectors are known
    only when everything was read (`complete`). States are kept in the model's dtype if it has 16 bits, else as float16.
    Memory: one layer's inputs of a pass, and a byte a token of all."""

    def __init__(
        self,
        shape: ModelShape,
        sites: Sequence[ExpertsSite],
        device: torch.device,
        total: int,
        settings: CalibrationSettings,
        folder: Path | None = None,
    ) -> None:
        """`device`: the model's. `total`: tokens that will be read. `folder`: on the disk to use; None = the system's
        folder for temporary files. Raises ProfileError when it has not enough room."""
        layout, tokens = record(shape, settings), min(total, settings.estimator_tokens)
        check_disk(settings.training_bytes(shape, tokens), tokens, folder)
        self.hidden = shape.hidden
        random, self._seen, self._chosen = np.random.default_rng(SEED), 0, 0
        self._drawn = np.zeros(total, bool)
        self._drawn[random.choice(total, tokens, replace=False)] = True
        self._sites, self._device, self._layout = sites, device, layout
        self._quasi, self._residual = settings.estimator_input == "quasi", set[int]()  # layers with a residual stream
        self._defaults = torch.zeros(0)
        self._dtype: torch.dtype | None = None
        self._rows, self._tested = torch.zeros(0, dtype=torch.int64), np.zeros(0, bool)  # of the pass
        self._before: Records | None = None
        self.train, self.test = (StateFile(layout, self._inputs, folder) for _ in range(2))

    def begin(self, tokens: int) -> None:
        """A pass over `tokens` tokens follows."""
        rows = np.flatnonzero(self._drawn[self._seen : self._seen + tokens])
        self._seen += tokens
        self._tested = np.arange(self._chosen, self._chosen + len(rows)) % HELD_OUT == HELD_OUT - 1
        self._chosen += len(rows)
        self._rows, self._before = torch.from_numpy(rows), None

    def add(self, run: LayerRun) -> None:
        """Add the next layer of that pass. Raises ProfileError when the disk is full."""
        if not len(self._rows):
            return
        layer, rows = run.seen.layer, self._rows.to(run.ids.device)
        if self._before is not None:
            self._before["probs"] = _bits(run.seen.probs[rows], torch.float16).view(np.float16)
            self.train.write(self._before[~self._tested])
            self.test.write(self._before[self._tested])
        if layer + 1 == len(self._sites):
            return
        self._before = np.zeros(len(rows), self._layout)
        self._before["layer"], state = layer + 1, run.seen.hidden
        if self._quasi and run.seen.residual is not None and has_quasi_hidden(*self._sites[layer : layer + 2]):
            self._residual.add(layer + 1)
            state = run.seen.residual
        if self._quasi:
            self._before["ids"] = run.ids[rows].cpu().numpy()
            self._before["weights"] = run.weights[rows].float().cpu().numpy()
        if self._dtype is None:
            self._dtype = torch.bfloat16 if state.dtype == torch.bfloat16 else torch.float16
        self._before["state"] = _bits(state[rows], self._dtype)

    def complete(self, defaults: npt.NDArray[np.float16] | None) -> None:
        """Everything was read. `defaults` [L, E, H]: the default vectors, for the quasi-hidden state."""
        if defaults is not None:
            self._defaults = torch.from_numpy(defaults)

    @property
    def trained(self) -> int:
        """Tokens to train on."""
        return self.train.count // (len(self._sites) - 1)

    def close(self) -> None:
        """Remove the files."""
        self.train.close()
        self.test.close()

    @torch.no_grad()
    def _inputs(self, records: Records) -> torch.Tensor:
        """[n, H] what the network is fed."""
        dtype = self._dtype or torch.float16
        states = torch.from_numpy(records["state"].copy()).view(dtype)
        for layer in sorted(self._residual.intersection(np.unique(records["layer"]).tolist())):
            rows = np.flatnonzero(records["layer"] == layer)
            ids, weights = (torch.from_numpy(records[name][rows].copy()) for name in ("ids", "weights"))
            output = functional.embedding_bag(
                ids.long(), self._defaults[layer - 1].float(), per_sample_weights=weights, mode="sum"
            )
            site, following = self._sites[layer - 1], self._sites[layer]
            q = quasi_hidden(site, following, states[rows].to(self._device), output.to(self._device))
            states[rows] = q.to(dtype).cpu()
        return states


def record(shape: ModelShape, settings: CalibrationSettings) -> np.dtype[Any]:
    """The layout of one example on disk: bits of a 16-bit state, and the distribution to predict."""
    quasi = [("ids", np.int16, (shape.top_k,)), ("weights", np.float32, (shape.top_k,))]
    return np.dtype(
        [("layer", np.int16), ("state", np.int16, (shape.hidden,)), ("probs", np.float16, (shape.experts,))]
        + (quasi if settings.estimator_input == "quasi" else [])
    )


def check_disk(needed_bytes: int, tokens: int, folder: Path | None) -> None:
    """Raises ProfileError when a folder's disk has not enough room for training data and SPARE_BYTES."""
    where = folder or Path(tempfile.gettempdir())
    free = shutil.disk_usage(where).free
    if needed_bytes + SPARE_BYTES > free:
        fits = max(0, free - SPARE_BYTES) * tokens // needed_bytes
        raise ProfileError(
            f"Training the estimator on {tokens:,} tokens needs {format_bytes(needed_bytes)} of disk, but only "
            f"{format_bytes(free)} are free in {where}. Make room, set estimator_tokens to at most {fits:,}, or leave "
            "the estimator out."
        )


def _bits(values: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[np.int16]:
    most = torch.finfo(dtype).max
    found: npt.NDArray[np.int16] = values.float().clamp(-most, most).to(dtype).cpu().view(torch.int16).numpy()
    return found
