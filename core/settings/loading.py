"""Settings of loading: which model, in which formats, where."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from core.errors import SettingError
from core.settings.budget import host_memory
from core.settings.config import Settings
from core.settings.formats import DENSE, LOADABLE
from core.settings.param import Param, Value, checked_values, declared
from core.system.paths import named_path


def draft_folder(text: str) -> str:
    """A folder, or "" for none. Raises SettingError for what no file system takes."""
    return str(named_path(text, SettingError)) if text.strip() else ""


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how. `model` is "demo" or a directory with config.json, a tokenizer and safetensors."""

    model: str = "demo"
    format: Annotated[
        str,
        Param(
            "How expert weights are kept: as in the checkpoint (exact), or rounded to "
            "fewer bits (smaller; the answers are then those of the rounded weights). A number behind g is how many "
            "weights share a scale: fewer are more exact and larger. A pack has the format it was imported in.",
            title="Expert format",
            choices=LOADABLE,
        ),
    ] = "checkpoint"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Param(
            "Number type of activations and dense weights. auto = the checkpoint's.",
            title="Compute type",
            advanced=True,
        ),
    ] = "auto"
    dense: Annotated[
        str,
        Param(
            "How the layers outside the experts are kept (attention, shared experts, "
            "the output layer): as in the checkpoint, or rounded as experts can be, which is smaller, faster, and "
            "changes the answers. Embeddings, norms and routers are never rounded; beside 4 bits, "
            "values that several heads of attention share have 8.",
            title="Dense format",
            choices=DENSE,
            advanced=True,
        ),
    ] = "checkpoint"
    arithmetic: Annotated[
        Literal["auto", "fast", "reference"],
        Param(
            "reference = transformers' own modules and products: its very bits. fast = one function of our own, on a "
            "CPU faster, on a GPU never measured, whose answers do not depend on how a prompt is cut, on other prompts "
            "of a batch, or on the number of threads; they differ slightly from the reference's. Of layers that it "
            "does not know it computes the experts alone: the reference computes the rest, and the model's status says "
            "why. auto = on a CPU fast where that difference, measured once at the first load, is within a bound; else "
            "reference.",
            title="Arithmetic",
            advanced=True,
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"],
        Param("Where the model runs. auto = the GPU when there is one.", title="Device", advanced=True),
    ] = "auto"
    host: Annotated[
        str,
        Param(
            "Host memory for experts that are not on the device, when an expert pack is loaded: "
            "all of them, none (misses are read from disk), or a size like 8GB. auto = on a GPU as many as fit in free "
            "memory, on a CPU none: there the budget itself is host memory.",
            title="Host memory",
            parse=host_memory,
            advanced=True,
        ),
    ] = "auto"
    blocks: Annotated[
        int,
        Param(
            "In how many equal parts experts are cached, so that the first of them can stay while others are fetched "
            "(MoEpic). Answers have the bits of whole experts on a CPU; a GPU sums the parts, and rounds otherwise. "
            "A pack imported in as many blocks lets the disk read each alone. 1 = whole experts.",
            title="Blocks per expert",
            low=1,
            high=64,
            step=1,
            advanced=True,
        ),
    ] = 1
    threads: Annotated[
        int,
        Param(
            "CPU threads that decode a token; prompts are read with all of them. 0 = whatever is "
            "fastest here, timed at load: many small products are often quicker on one. No effect on a GPU.",
            title="Decode threads",
            low=0,
            high=256,
            step=1,
            advanced=True,
        ),
    ] = 0
    context: Annotated[
        int,
        Param(
            "Longest chat in tokens; its KV cache is counted in the budget. 0 = the model's own limit, at most 8192.",
            title="Context length",
            low=0,
            high=1048576,
            step=64,
            unit="tokens",
        ),
    ] = 0
    sequences: Annotated[
        int,
        Param(
            "Texts of the whole context length whose KV caches the budget has room for, so that several prompts are "
            "answered together. Shorter ones are as far as they fit, also with 1.",
            title="Parallel requests",
            low=1,
            high=256,
            step=1,
            advanced=True,
        ),
    ] = 1

    draft: Annotated[
        str,
        Param(
            "Folder of a small dense model with the same tokens, which guesses those that follow where drafts is model "
            "or auto. Its weights, and keys and values of up to 2048 tokens, are counted in the budget; dense format "
            "and compute type are also its own. In the fast arithmetic on a CPU.",
            title="Draft model",
            parse=draft_folder,
            advanced=True,
        ),
    ] = ""

    settings: Settings = field(default_factory=Settings)

    @classmethod
    def checked(cls, model: str, settings: Settings | None = None, **values: object) -> LoadSpec:
        """Build from untrusted values. Raises SettingError with the bounds."""
        if model != "demo":
            named_path(model, SettingError)
        return cls(model=model, settings=settings or Settings(), **checked_values(cls, values, "loading"))

    def describe(self) -> dict[str, Value]:
        """The loading choices as plain values, for the manifest and the log."""
        return {"model": self.model, **{name: getattr(self, name) for name in declared(type(self))}}
