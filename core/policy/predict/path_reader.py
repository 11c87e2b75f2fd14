"""Numpy inference of ExpertFlow's routing-path predictor: the network of core.policy.predict.nets.path, one request.

It runs in a worker process that then needs no torch; for one token at a time it is also faster.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.predict.worker import WorkerTask

Singles = npt.NDArray[np.float32]
WINDOW = 256  # tokens that the encoder and the decoder attend to
ROOM = 4 * WINDOW  # positions stored before the oldest are removed
BUCKETS, FARTHEST = 32, 128  # of relative distances, as in T5
HEAD = struct.Struct("<2i")  # of a message: pass, whether a new request begins; then the tokens, int32
ANSWER = struct.Struct("<q")  # of an answer: pass; then [L, E] float32


def asked(number: int, fresh: bool, tokens: Sequence[int]) -> bytes:
    """The message that the model is given these tokens in this pass."""
    return HEAD.pack(number, fresh) + np.array(tokens, "<i4").tobytes()


def answered(answer: bytes) -> tuple[int, Singles]:
    """(pass, [L * E] probability that some of its tokens requests each expert)."""
    return ANSWER.unpack_from(answer)[0], np.frombuffer(answer, "<f4", offset=ANSWER.size)


class PathReader:
    """A core.policy.predict.worker.Worker. `task.sizes` is the network's configuration, `task.arrays` its weights."""

    def __init__(self, task: WorkerTask) -> None:
        sizes, weights = task.sizes, {name: np.ascontiguousarray(a) for name, a in task.arrays.items()}
        self._shape = sizes["layers"], sizes["experts"]
        heads, d_kv = sizes["heads"], sizes["d_kv"]
        self._tokens, self._embed = weights["tokens"].astype(np.int64), weights["embed.weight"]
        count = BUCKETS // 2
        near = _bucket(np.arange(ROOM), count)
        self._both = weights["reads.values.weight"][np.concatenate((near[:0:-1], near + count * (np.arange(ROOM) > 0)))]
        self._back = weights["writes.values.weight"][_bucket(np.arange(ROOM), BUCKETS)].T.copy()  # [heads, distance]
        self._encoder = [_Block(_under(weights, f"encoder.{i}"), heads, d_kv) for i in range(sizes["blocks"])]
        self._decoder = [_Block(_under(weights, f"decoder.{i}"), heads, d_kv) for i in range(sizes["blocks"])]
        self._read_norm, self._write_norm = weights["read_norm.weight"], weights["write_norm.weight"]
        self._heads, self._bias = weights["heads.weight"].T, weights["heads.bias"]
        self._prompt: list[int] = []
        self._begun = False

    def work(self, message: bytes) -> bytes:
        number, fresh = HEAD.unpack_from(message)
        if fresh:
            self.restart()
        predicted = self.follow(np.frombuffer(message, "<i4", offset=HEAD.size).tolist())
        return ANSWER.pack(number) + predicted.astype("<f4", copy=False).tobytes()

    def restart(self) -> None:
        """Start a new request."""
        self._prompt, self._begun = [], False
        for block in self._decoder:
            block.forget()

    def follow(self, tokens: Sequence[int]) -> Singles:
        """[L, E] probability that some of `tokens`, the next ones the model is given, requests each expert: 1 - product
        over the tokens of (1 - p). The prompt is the tokens of passes with several tokens."""
        if not self._begun or len(tokens) > 1:
            self._prompt, self._begun = [*self._prompt, *tokens][-WINDOW:], True
            self._encode(self._prompt)
        idle: Singles = np.zeros(self._shape, np.float32)  # log of the probability that no token requests it
        for at in range(0, len(tokens), WINDOW):
            logits = self._decode(tokens[at : at + WINDOW]).reshape(-1, *self._shape)
            idle -= np.logaddexp(np.float32(0.0), logits).sum(0)
        predicted: Singles = -np.expm1(idle)
        return predicted

    def _encode(self, ids: Sequence[int]) -> None:
        x = self._embed[self._places(ids)]
        ahead = np.arange(len(ids)) - np.arange(len(ids))[:, None]  # distance of each key from each query
        bias = self._both[ahead + ROOM - 1].transpose(2, 0, 1)
        for block in self._encoder:
            x = block.forward(x, bias)
            block.forget()
        x = _normed(x, self._read_norm)
        for block in self._decoder:
            block.read(x)

    def _decode(self, ids: Sequence[int]) -> Singles:
        """[T, L * E] logits."""
        x, count, before = self._embed[self._places(ids)], len(ids), self._decoder[0].length
        if count == 1:
            bias = self._back[:, before::-1][:, None]
        else:
            back = np.arange(before, before + count)[:, None] - np.arange(before + count)
            bias = np.where(back >= 0, self._back[:, np.maximum(back, 0)], np.float32(-np.inf))
        for block in self._decoder:
            x = block.forward(x, bias)
            block.shorten()
        logits: Singles = _normed(x, self._write_norm) @ self._heads + self._bias
        return logits

    def _places(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Token ids -> rows of the embedding."""
        wanted = np.array(ids, np.int64)
        if not len(self._tokens):
            return np.zeros_like(wanted)
        at = np.minimum(np.searchsorted(self._tokens, wanted), len(self._tokens) - 1)
        return np.where(self._tokens[at] == wanted, at + 1, 0)


class _Block:
    """One block, with keys and values [heads, S, d_kv] of its past positions and of the prompt."""

    def __init__(self, weights: Mapping[str, Any], heads: int, d_kv: int) -> None:
        self._heads, self._d_kv = heads, d_kv
        self._norm, self._ff_norm = weights["norm.weight"], weights["ff_norm.weight"]
        self._qkv = np.concatenate([weights[f"attend.{part}.weight"] for part in "qkv"]).T
        self._o, self._wi, self._wo = (weights[f"{part}.weight"].T for part in ("attend.o", "wi", "wo"))
        self._cross = "cross_norm.weight" in weights
        if self._cross:
            self._cross_norm = weights["cross_norm.weight"]
            self._cross_q, self._cross_o = weights["cross.q.weight"].T, weights["cross.o.weight"].T
            self._cross_kv = np.concatenate([weights[f"cross.{part}.weight"] for part in "kv"]).T
        self._kept: Singles = np.empty((2, heads, ROOM, d_kv), np.float32)
        self._prompt: Singles = self._kept[:, :, :0]
        self._start = self._end = 0

    @property
    def length(self) -> int:
        """Number of past positions still attended to."""
        return self._end - self._start

    def forget(self) -> None:
        self._start = self._end = 0

    def shorten(self) -> None:
        """Limit the next position to WINDOW - 1 past ones."""
        self._start = max(self._start, self._end - (WINDOW - 1))

    def read(self, x: Singles) -> None:
        """Set the prompt's states [S, d]."""
        self._prompt = self._split(x @ self._cross_kv, 2)

    def forward(self, x: Singles, bias: Singles) -> Singles:
        """States [T, d] -> the next block's; `bias` [heads, T, S] for all attended positions, these included."""
        count = len(x)
        query, *new = self._split(_normed(x, self._norm) @ self._qkv, 3)
        if self._end + count > ROOM:
            self._kept[:, :, : self.length] = self._kept[:, :, self._start : self._end].copy()
            self._start, self._end = 0, self.length
        self._kept[:, :, self._end : self._end + count] = new
        self._end += count
        x = x + self._over(query, self._kept[:, :, self._start : self._end], bias) @ self._o
        if self._cross:
            query = self._split(_normed(x, self._cross_norm) @ self._cross_q, 1)[0]
            x = x + self._over(query, self._prompt, None) @ self._cross_o
        out: Singles = x + np.maximum(_normed(x, self._ff_norm) @ self._wi, 0.0) @ self._wo
        return out

    def _over(self, query: Singles, held: Singles, bias: Singles | None) -> Singles:
        """[T, heads * d_kv] attention of the queries [heads, T, d_kv] over keys and values `held` [2, heads, S,
        d_kv]."""
        scores = query @ held[0].transpose(0, 2, 1)
        if bias is not None:
            scores += bias
        scores -= scores.max(-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(-1, keepdims=True)
        found: Singles = (scores @ held[1]).transpose(1, 0, 2).reshape(query.shape[1], -1)
        return found

    def _split(self, x: Singles, parts: int) -> Singles:
        """[T, parts * heads * d_kv] -> [parts, heads, T, d_kv]."""
        return x.reshape(len(x), parts, self._heads, self._d_kv).transpose(1, 2, 0, 3)


def _normed(x: Singles, weight: Singles) -> Singles:
    """RMSNorm."""
    square = np.einsum("td,td->t", x, x)[:, None] / np.float32(x.shape[1])
    normed: Singles = x / np.sqrt(square + np.float32(1e-6)) * weight
    return normed


def _bucket(far: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """Distances [n] -> rows of T5's table of `count`: exact when near, logarithmic up to FARTHEST, one row beyond."""
    exact = count // 2
    share = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(exact)) / np.float32(math.log(FARTHEST / exact))
    logarithmic = np.minimum(exact + (share * np.float32(count - exact)).astype(np.int64), count - 1)
    return np.where(far < exact, far, logarithmic)


def _under(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(f"{prefix}."): one for name, one in weights.items() if name.startswith(f"{prefix}.")}
