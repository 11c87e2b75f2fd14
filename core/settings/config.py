"""User settings: how to load a model, how its experts are cached and prefetched, how tokens are sampled.

`Settings` are the parameters that act while the model runs. They are one flat, immutable mapping of dotted names
("budget", "eviction", "eviction.decay", "link_gbps"), so a change is a name and a value everywhere: in the UI, on the
command line, in the CSV and in the log.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from core.errors import SettingError
from core.settings.formats import DENSE, LOADABLE
from core.settings.lossy import LOSSY
from core.settings.pins import Pins
from core.settings.registry import Param, Value, variant, variants

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True, slots=True)
class Budget:
    """How much device memory may be used: a share of all routed experts, or total bytes for everything."""

    share: float | None = None
    bytes: int | None = None

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Read "50%", "all", "6.5GB", "800 MiB" or a plain number of bytes. Raises SettingError."""
        clean = text.strip().lower().replace(",", "")
        if clean == "all":
            return cls(share=1.0)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", clean):
            share = float(match[1]) / 100
            if not 0 <= share <= 1:
                raise SettingError(f"budget {text!r} is not between 0 % and 100 % of the experts.")
            return cls(share=share)
        if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", clean):
            if match[2] in UNITS:
                return cls(bytes=int(float(match[1]) * UNITS[match[2]]))
        raise SettingError(
            f"budget {text!r} is not understood. Write a share of the experts like 50%, or bytes like 6.5GB."
        )

    def __str__(self) -> str:
        return f"{self.share * 100:g}%" if self.share is not None else f"{self.bytes}"


def _budget(text: str) -> Value:
    return str(Budget.parse(text))


def _pins(text: str) -> Value:
    return str(Pins.parse(text))


GENERAL: tuple[Param, ...] = (
    Param(
        "budget",
        "text",
        "50%",
        "Device memory Moestro may use: a share of all routed experts (50%) plus what the "
        "rest of the model needs, or total bytes (6.5GB). Moving it resizes the cache between two tokens.",
        title="Memory budget",
        parse=_budget,
    ),
    Param(
        "eviction", "choice", "lru", "Which expert leaves the device when another needs its slot.", title="Cache policy"
    ),
    Param(
        "scope",
        "choice",
        "layer",
        "Whether each layer has its own slots, or all layers share one pool.",
        title="Cache scope",
        choices=("layer", "global"),
    ),
    Param(
        "layer_slots",
        "choice",
        "uniform",
        "How the slots are divided among layers that each have their own.",
        title="Slots per layer",
    ),
    Param(
        "pins",
        "text",
        "",
        "Experts that are loaded at once and stay: layer:expert pairs like 0:3, 5:17, or top:2 "
        "for the 2 that a profile saw used most in every layer. Empty = none.",
        title="Pinned experts",
        parse=_pins,
    ),
    Param("predictor", "choice", "none", "Which experts are fetched before they are needed.", title="Prefetcher"),
    Param(
        "prefetch_deadline",
        "bool",
        False,
        "Do not fetch ahead what could not arrive before its layer is reached, "
        "by the times measured so far: the link stays free for what is asked for.",
        title="Only what arrives in time",
    ),
    Param(
        "prefetch_auto",
        "bool",
        False,
        "Pause fetching ahead while it costs more than it saves, as measured over "
        "the last tokens, and try it again after a while.",
        title="Pause when it does not pay",
    ),
    Param(
        "link",
        "choice",
        "auto",
        "Which link the copies go over: this machine's own, or an emulated one that paces "
        "them to the bandwidth below and marks every figure as emulated. auto = own, but for the bundled demo model "
        "on a CPU an emulated one, as slow for it as PCIe is for a large model.",
        title="Link",
        choices=("auto", "own", "emulated"),
    ),
    Param(
        "link_gbps",
        "float",
        1.0,
        "Bandwidth of the emulated link.",
        title="Emulated bandwidth",
        low=0.001,
        high=128.0,
        step=0.01,
        unit="GB/s",
    ),
    Param(
        "link_latency_us",
        "float",
        10.0,
        "Latency added to every copy of the emulated link.",
        title="Emulated latency",
        low=0.0,
        high=10000.0,
        step=1.0,
        unit="us",
    ),
    Param(
        "telemetry",
        "bool",
        True,
        "Record timings and counters of every token. Off only to measure their cost.",
        title="Telemetry",
    ),
    Param(
        "regret",
        "bool",
        True,
        "In the dashboard, compare the cache policy live with every other one and with the "
        "best possible one, on the very tokens of the chat. It runs beside the engine, in a process of low priority.",
        title="Compare cache policies",
    ),
    Param(
        "regret_tokens",
        "int",
        512,
        "How many of the last tokens are compared.",
        title="Tokens to compare",
        low=32,
        high=4096,
        step=32,
        unit="tokens",
    ),
    *LOSSY,
)
KINDS = ("eviction", "layer_slots", "predictor", "substitute")


def params() -> dict[str, Param]:
    """Every live parameter by its dotted name: the general ones and each variant's own ("eviction.lfu.decay")."""
    found: dict[str, Param] = {}
    for param in GENERAL:
        if param.name in KINDS:
            names = tuple(v.name for v in variants(param.name))
            param = Param(param.name, "choice", param.default, param.help, title=param.title, choices=names)
        found[param.name] = param
    for kind in KINDS:
        for choice in variants(kind):
            found |= {f"{kind}.{choice.name}.{p.name}": p for p in choice.params}
    return found


class Settings(Mapping[str, Value]):
    """An immutable, checked set of all live parameters. `with_` returns a changed copy; bad values change nothing."""

    def __init__(self, values: Mapping[str, object] | None = None) -> None:
        known = params()
        for name in values or {}:
            if name not in known:
                raise SettingError(f"There is no setting called {name!r}. Settings: {', '.join(known)}.")
        self._values = {n: p.check((values or {}).get(n, p.default)) for n, p in known.items()}

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def with_(self, changes: Mapping[str, object]) -> Settings:
        """A copy with some values changed. Raises SettingError; this object never changes."""
        return Settings({**self._values, **changes})

    def diff(self, other: Settings) -> dict[str, Value]:
        """The differing values, as name -> value in `other`."""
        return {n: v for n, v in other.items() if self._values[n] != v}

    def choice(self, kind: str) -> tuple[str, dict[str, Value]]:
        """The chosen variant of a kind and the values of its own parameters."""
        name = str(self._values[kind])
        return name, {p.name: self._values[f"{kind}.{name}.{p.name}"] for p in variant(kind, name).params}

    @property
    def budget(self) -> Budget:
        """The memory budget, parsed."""
        return Budget.parse(str(self._values["budget"]))


ANY_SEED = -1
SAMPLING: tuple[Param, ...] = (
    Param(
        "temperature",
        "float",
        0.0,
        "0 always takes the likeliest token; higher values vary more.",
        title="Temperature",
        low=0.0,
        high=2.0,
        step=0.05,
    ),
    Param(
        "top_k",
        "int",
        0,
        "Sample only among this many likeliest tokens. 0 = no limit.",
        title="Top-k",
        low=0,
        high=1000,
        step=1,
    ),
    Param(
        "top_p",
        "float",
        1.0,
        "Sample only among the likeliest tokens that together reach this probability.",
        title="Top-p",
        low=0.05,
        high=1.0,
        step=0.01,
    ),
    Param(
        "min_p",
        "float",
        0.0,
        "Drop tokens less likely than this share of the likeliest.",
        title="Min-p",
        low=0.0,
        high=1.0,
        step=0.01,
    ),
    Param(
        "repetition_penalty",
        "float",
        1.0,
        "Above 1 makes tokens already said less likely.",
        title="Repetition penalty",
        low=1.0,
        high=2.0,
        step=0.01,
    ),
    Param(
        "max_new_tokens",
        "int",
        256,
        "The longest answer, in tokens.",
        title="Longest answer",
        low=1,
        high=32768,
        step=1,
        unit="tokens",
    ),
    Param(
        "seed",
        "int",
        ANY_SEED,
        "The same seed and settings give the same answer. -1 = a new one for every answer, "
        "drawn at random and recorded with it.",
        title="Seed",
        low=ANY_SEED,
        high=2**63 - 1,
        step=1,
    ),
)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. Build with `Sampling.checked(...)` from untrusted values."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 256
    seed: int = ANY_SEED

    def drawn(self) -> Sampling:
        """The same with a definite seed, to use and to record: its own, or a random one of 31 bits."""
        return self if self.seed != ANY_SEED else replace(self, seed=secrets.randbelow(2**31))

    @classmethod
    def checked(cls, **values: object) -> Sampling:
        """Build from untrusted values. Raises SettingError with the bounds."""
        known = {p.name: p for p in SAMPLING}
        for name in values:
            if name not in known:
                raise SettingError(f"There is no sampling setting called {name!r}. Settings: {', '.join(known)}.")
        checked: dict[str, Any] = {n: known[n].check(v) for n, v in values.items()}
        return cls(**checked)


def host_memory(text: str) -> Value:
    """Checks a size of the host tier: "auto", "all", "none" or bytes. Raises SettingError."""
    clean = text.strip().lower()
    if clean in ("auto", "all", "none"):
        return clean
    budget = Budget.parse(clean)
    if budget.bytes is None:
        raise SettingError(f"host memory {text!r} is not understood. Write auto, all, none, or a size like 8GB.")
    return str(budget.bytes)


LOADING: tuple[Param, ...] = (
    Param(
        "format",
        "choice",
        "checkpoint",
        "How expert weights are kept: as in the checkpoint (exact), or rounded to "
        "fewer bits (smaller; the answers are then those of the rounded weights). A number behind g is how many "
        "weights share a scale: fewer are more exact and larger. A pack has the format it was imported in.",
        title="Expert format",
        choices=LOADABLE,
        live=False,
    ),
    Param(
        "dtype",
        "choice",
        "auto",
        "Number type of activations and dense weights. auto = the checkpoint's.",
        title="Compute type",
        choices=("auto", "float32", "bfloat16", "float16"),
        live=False,
    ),
    Param(
        "dense",
        "choice",
        "checkpoint",
        "How the layers outside the experts are kept (attention, shared experts, "
        "the output layer): as in the checkpoint, or rounded as experts can be, which is smaller, faster, and "
        "changes the answers. Embeddings, norms and routers are never rounded.",
        title="Dense format",
        choices=DENSE,
        live=False,
    ),
    Param(
        "device",
        "choice",
        "auto",
        "Where the model runs. auto = the GPU when there is one.",
        title="Device",
        choices=("auto", "cpu", "cuda"),
        live=False,
    ),
    Param(
        "host",
        "text",
        "auto",
        "Host memory for experts that are not on the device, when an expert pack is loaded: "
        "all of them, none (misses are read from disk), or a size like 8GB. auto = on a GPU as many as fit in free "
        "memory, on a CPU none: there the budget itself is host memory.",
        title="Host memory",
        live=False,
        parse=host_memory,
    ),
    Param(
        "threads",
        "int",
        0,
        "CPU threads that decode a token; prompts are read with all of them. 0 = whatever is "
        "fastest here, timed at load: many small products are often quicker on one. No effect on a GPU.",
        title="Decode threads",
        low=0,
        high=256,
        step=1,
        live=False,
    ),
    Param(
        "context",
        "int",
        0,
        "Longest chat in tokens; its KV cache is counted in the budget. 0 = the model's own limit, at most 8192.",
        title="Context length",
        low=0,
        high=1048576,
        step=64,
        unit="tokens",
        live=False,
    ),
)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """What to load and how. `model` is "demo" or a directory with config.json, a tokenizer and safetensors."""

    model: str = "demo"
    format: str = "checkpoint"
    dtype: str = "auto"
    dense: str = "checkpoint"
    device: str = "auto"
    host: str = "auto"
    threads: int = 0
    context: int = 0
    settings: Settings = field(default_factory=Settings)

    @classmethod
    def checked(cls, model: str, settings: Settings | None = None, **values: object) -> LoadSpec:
        """Build from untrusted values. Raises SettingError with the bounds."""
        known = {p.name: p for p in LOADING}
        checked: dict[str, Any] = {n: known[n].check(v) for n, v in values.items()}
        return cls(model=model, settings=settings or Settings(), **checked)

    def describe(self) -> dict[str, Value]:
        """The loading choices as plain values, for the manifest and the log."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "settings"}
