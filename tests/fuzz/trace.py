"""Traces of every kind that is read: our own files, `.npz`, CSV and JSON; read whole, and replayed."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from core.profile.trace import Chunk, TraceHead, TraceWriter, open_trace
from core.profile.trace.chunk import RANKED, map_type
from core.simulate import Config, simulate
from tests.fuzz.changes import Change, Gone, act, change_array
from tests.fuzz.draw import byte_change, drawn, file_change, json_change
from tests.fuzz.mutant import Mutant

LAYERS, EXPERTS, TOP_K, TOKENS = 2, 6, 2, 24
CELLS = (*"-1 x 1e9 99999999999999999999 0.5 NaN 0,0,1,2 \u0664 3;4 \x00".split(" "), "", "0 0 0", "2" * 5000)
ARRAYS: tuple[str, ...] = ("float64", "int64", "uint8", "bool", "<U4", "complex64")


@act("head")
def set_head(file: Path, change: Mapping[str, Any]) -> None:
    """Another second line of one of our own traces."""
    first, _, rest = file.read_bytes().split(b"\n", 2)
    file.write_bytes(b"\n".join([first, change["text"].encode(), rest]))


@act("array")
def change_npz(file: Path, change: Mapping[str, Any]) -> None:
    """An array of an `.npz` is left out, or has another shape, type or number."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays: dict[str, Any] = dict(opened)
    except Exception:
        raise Gone from None
    change_array(arrays, change["name"], change)
    np.savez(file, **arrays)


def routed(seed: int = 0) -> Any:
    return np.argsort(np.random.default_rng(seed).random((TOKENS, LAYERS, EXPERTS)), 2)[..., :TOP_K]


def write_native(path: Path) -> None:
    """Two frames, with everything that a trace can hold."""
    rng = np.random.default_rng(1)
    with TraceWriter(
        path, TraceHead(LAYERS, EXPERTS, TOP_K, model="m", model_hash="h", probs=True, predictor=("gate", {"depth": 1}))
    ) as writer:
        for start in (0, TOKENS // 2):
            ids = routed()[start : start + TOKENS // 2]
            n = len(ids)
            ranked = np.zeros(3, RANKED)
            ranked["layer"], ranked["expert"] = 1, (0, 1, 2)
            writer.write(
                Chunk(
                    ids.astype(np.uint8),
                    np.ones(n, np.int32),
                    np.ones(n, np.bool_),
                    np.zeros(n, np.int32),
                    np.arange(n, dtype=np.int32),
                    np.full(ids.shape, 0.5, np.float16),
                    rng.random((n, LAYERS, EXPERTS)).astype(np.float16),
                    ranked,
                    np.array([(0, 0, 1, np.full(EXPERTS, 1 / EXPERTS))], map_type(EXPERTS)),
                )
            )
            writer.flush()


def rows() -> list[tuple[int, int, list[int]]]:
    return [(t, layer, routed()[t, layer].tolist()) for t in range(TOKENS) for layer in range(LAYERS)]


class Traces:
    """What was read must keep what the reader promises (`core.profile.trace.Chunk`), and can then be replayed."""

    name = "trace"
    samples = ("t.trace", "t.npz", "t.csv", "t.json", "t.jsonl")

    def make(self, sample: str, folder: Path) -> None:
        path = folder / sample
        if sample == "t.trace":
            write_native(path)
        elif sample == "t.npz":
            np.savez(
                path,
                experts=routed().transpose(1, 0, 2),
                weights=np.full((LAYERS, TOKENS, TOP_K), 0.5),
                tok=np.arange(TOKENS),
                rid=np.zeros(TOKENS, np.int64),
            )
        elif sample == "t.csv":
            lines = [f"{token},{layer},{' '.join(map(str, ids))}\n" for token, layer, ids in rows()]
            path.write_text("".join(["token,layer,experts\n", *lines]))
        elif sample == "t.json":
            path.write_text(json.dumps([{"token": t, "layer": n, "experts": e} for t, n, e in rows()]))
        else:
            path.write_text("".join(json.dumps([t, n, e]) + "\n" for t, n, e in rows()))

    def draw(self, rng: Random, sample: str, folder: Path) -> list[Change]:
        own = {"t.json": lambda: json_change(rng, folder, sample), "t.trace": lambda: self._native(rng, folder)}
        own |= {"t.npz": lambda: self._array(rng)}
        return drawn(
            rng,
            (0.04, lambda: file_change(rng, sample)),
            (0.26, lambda: byte_change(rng, folder, sample)),
            (0.70, own.get(sample, lambda: self._line(rng, sample))),
        )

    @staticmethod
    def _line(rng: Random, sample: str) -> Change:
        cell = rng.choice(CELLS)
        cells = [[cell], [f"{cell},0,1 2"], [f"0,{cell},1 2"], [f"0,0,{cell}"], ["0,0,1 2", "0,0,3 4"]]
        others = [[], ["[" * 100_000], ['{"token": 0, "layer": 0}'], ["[0, 0, [1, {}]]"], ["null"]]
        to = rng.choice([*cells, *others])
        return {"do": "lines", "file": sample, "line": rng.randrange(TOKENS * LAYERS), "to": to}

    @staticmethod
    def _native(rng: Random, folder: Path) -> Change:
        """Another head, or another number in the head of a frame."""
        data = (folder / "t.trace").read_bytes()
        frame = data.index(b"pass", data.index(b"\n", data.index(b"{")))
        if rng.random() < 0.5:
            offset = rng.choice((0, 4, 8, 12)) + frame
            number = rng.choice((0, 1, 11, 13, 2**31 - 1, 2**32 - 1, 2**63))
            return {
                "do": "write",
                "file": "t.trace",
                "offset": offset,
                "hex": struct.pack("<Q", number)[: 8 if offset - frame == 12 else 4].hex(),
            }
        head = json.loads(data[data.index(b"{") :].split(b"\n")[0])
        key = rng.choice(list(head))
        head[key] = rng.choice([None, -1, 0, 1, 2**40, "x", [], {}, 3, 7, 1e400, "9" * 5000])
        if rng.random() < 0.2:
            del head[key]
        return {"do": "head", "file": "t.trace", "text": json.dumps(head) if rng.random() < 0.9 else "[" * 100_000}

    @staticmethod
    def _array(rng: Random) -> Change:
        return {
            "do": "array",
            "file": "t.npz",
            "name": rng.choice(("experts", "weights", "tok", "rid")),
            "as": rng.choice(("drop", "shape", "type", "value", "empty")),
            "type": rng.choice(ARRAYS),
            "value": rng.choice((-1, 5, 6, 300, 2**31, 2**62)),
            "at": rng.randrange(TOKENS),
        }

    def use(self, folder: Path, mutant: Mutant) -> dict[str, Any]:
        trace = open_trace(folder / mutant.sample)
        chunks = list(trace.chunks())
        lru = Config("lru", max(trace.top_k * trace.layers, 1))
        replayed = str(simulate(trace, [lru], processes=1)) if trace.tokens else ""
        seen: dict[str, Any] = {"shape": (trace.layers, trace.experts, trace.top_k, trace.tokens), "replayed": replayed}
        for name in Chunk.__slots__:
            parts = [getattr(chunk, name) for chunk in chunks]
            if parts and all(part is not None for part in parts):
                field = {"ranked": "expert", "maps": "distribution"}.get(name)
                seen[name] = np.concatenate(parts) if field is None else np.concatenate(parts)[field]
        return seen

    def explain(self, folder: Path, mutant: Mutant, seen: dict[str, Any], whole: dict[str, Any]) -> str:
        layers, experts, top_k, tokens = seen["shape"]
        if not tokens:
            return "a trace without tokens was taken" if mutant.sample != "t.trace" else ""
        ids, sizes = seen["ids"], seen["sizes"]
        if ids.shape != (tokens, layers, top_k) or not 0 <= int(ids.min()) <= int(ids.max()) < experts:
            return "ids that do not fit the shape"
        if int(sizes.sum()) != tokens or (sizes <= 0).any():
            return "passes that are not as many tokens"
        passes = len(sizes)
        if any(len(seen[name]) != passes for name in ("decode", "rid")):
            return "not one entry a pass"
        for name in ("tok", "weights", "probs"):
            if name in seen and len(seen[name]) != tokens:
                return f"{name} is not of every token"
            if name in seen and name != "tok" and not np.isfinite(seen[name]).all():
                return f"{name} is not finite"
        return ""
