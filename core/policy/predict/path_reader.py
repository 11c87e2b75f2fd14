"""Numpy inference of ExpertFlow's routing-path predictor: the network of core.policy.predict.nets.path, for several
requests at a time.

It runs in a worker process that then needs no torch; for one token at a time it is also faster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from core.policy.predict.path_messages import Bools, Singles, answer, question
from core.policy.predict.worker import WorkerTask

WINDOW = 256  # tokens that the encoder and the decoder attend to
ROOM = 4 * WINDOW  # positions stored before the oldest are removed
FEW = 32  # ... and how many there is room for at first
TEXTS = 256  # requests that are followed, the latest
BUCKETS, FARTHEST = 32, 128  # of relative distances, as in T5
ACTIVE = "active"  # in a task's sizes: experts of a layer that a token is taken to need; 0 = those above one half


def needed(idle: Singles, most: int) -> Bools:
    """[L, E] which experts are taken to be needed: the `most` likeliest of each layer, or with 0 those above one half.
    `idle` [L, E] as in Answer."""
    if not most:
        return idle < np.float32(math.log(0.5))
    found: Bools = np.ones(idle.shape, np.bool_)
    if most < idle.shape[1]:
        np.put_along_axis(found, np.argsort(idle, 1, "stable")[:, most:], False, 1)
    return found


class PathReader:
    """A core.policy.predict.worker.Worker. `task.sizes` is the network's configuration, `task.arrays` its weights."""

    def __init__(self, task: WorkerTask) -> None:
        sizes, weights = task.sizes, {name: np.ascontiguousarray(a) for name, a in task.arrays.items()}
        self._shape, self._active = (sizes["layers"], sizes["experts"]), sizes.get(ACTIVE, 0)
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
        self._texts: dict[int, _Text] = {}  # by request, the one followed last at the end

    def work(self, message: bytes) -> bytes:
        number, shares = question(message)
        texts = [self._text(share.request, fresh=share.fresh) for share in shares]
        idle = self._idle(texts, [share.tokens for share in shares])
        active = [needed(one, self._active * len(share.tokens)) for one, share in zip(idle, shares, strict=True)]
        requests, cells = [share.request for share in shares], (len(shares), -1)
        return answer(number, requests, idle.reshape(cells), np.stack(active).reshape(cells))

    def restart(self) -> None:
        """Start a new request in place of the one that `follow` follows."""
        self._text(0, fresh=True)

    def follow(self, tokens: Sequence[int]) -> Singles:
        """[L, E] probability that some of `tokens`, the next ones of one request, requests each expert: 1 - product
        over the tokens of (1 - p). The prompt is the tokens of passes with several tokens."""
        predicted: Singles = -np.expm1(self._idle([self._text(0)], [tokens])[0])
        return predicted

    def _text(self, request: int, *, fresh: bool = False) -> _Text:
        text = self._texts.pop(request, None)
        if text is None or fresh:
            text = _Text([_Past(*block.held) for block in self._decoder])
        self._texts[request] = text
        while len(self._texts) > TEXTS:
            self._texts.pop(next(iter(self._texts)))
        return text

    def _idle(self, texts: Sequence[_Text], tokens: Sequence[Sequence[int]]) -> Singles:
        """[n, L, E] log of the probability that none of a text's next tokens requests an expert. Single tokens are
        computed together."""
        idle: Singles = np.zeros((len(texts), *self._shape), np.float32)
        alone = []
        for at, (text, some) in enumerate(zip(texts, tokens, strict=True)):
            if not text.prompt or len(some) > 1:
                text.prompt = [*text.prompt, *some][-WINDOW:]
                self._encode(text)
            if len(some) == 1:
                alone.append(at)
            for first in range(0, len(some), WINDOW) if len(some) > 1 else ():
                logits = self._decode([text], [some[first : first + WINDOW]])
                idle[at] -= np.logaddexp(np.float32(0.0), logits).reshape(-1, *self._shape).sum(0)
        if alone:
            logits = self._decode([texts[at] for at in alone], [tokens[at] for at in alone])
            idle[alone] = -np.logaddexp(np.float32(0.0), logits).reshape(-1, *self._shape)
        return idle

    def _encode(self, text: _Text) -> None:
        """What the decoder reads of a prompt."""
        ids = text.prompt
        x = self._embed[self._places(ids)]
        ahead = np.arange(len(ids)) - np.arange(len(ids))[:, None]  # distance of each key from each query
        bias = self._both[ahead + ROOM - 1].transpose(2, 0, 1)
        for block in self._encoder:
            x = block.forward(x, [_Past(*block.held)], [bias])
        x = _normed(x, self._read_norm)
        for block, past in zip(self._decoder, text.past, strict=True):
            past.prompt = block.reads(x)

    def _decode(self, texts: Sequence[_Text], tokens: Sequence[Sequence[int]]) -> Singles:
        """[T, L * E] logits of all tokens, text by text."""
        x = self._embed[self._places([token for some in tokens for token in some])]
        biases = [self._seen(text.past[0].length, len(some)) for text, some in zip(texts, tokens, strict=True)]
        for at, block in enumerate(self._decoder):
            x = block.forward(x, [text.past[at] for text in texts], biases)
        logits: Singles = _normed(x, self._write_norm) @ self._heads + self._bias
        return logits

    def _seen(self, before: int, count: int) -> Singles:
        """[heads, count, before + count] bias of the next `count` tokens' attention."""
        if count == 1:
            return self._back[:, before::-1][:, None]
        back = np.arange(before, before + count)[:, None] - np.arange(before + count)
        return np.where(back >= 0, self._back[:, np.maximum(back, 0)], np.float32(-np.inf))

    def _places(self, ids: Sequence[int]) -> npt.NDArray[np.int64]:
        """Token ids -> rows of the embedding."""
        wanted = np.array(ids, np.int64)
        if not len(self._tokens):
            return np.zeros_like(wanted)
        at = np.minimum(np.searchsorted(self._tokens, wanted), len(self._tokens) - 1)
        return np.where(self._tokens[at] == wanted, at + 1, 0)


class _Text:
    """What is known of a request: its prompt, and its past in each block of the decoder."""

    def __init__(self, past: list[_Past]) -> None:
        self.prompt: list[int] = []
        self.past = past


class _Past:
    """Keys and values [2, heads, S, d_kv] of one text in one block: of its past positions, and of the prompt."""

    def __init__(self, heads: int, d_kv: int) -> None:
        self._kept: Singles = np.empty((2, heads, FEW, d_kv), np.float32)
        self.prompt: Singles = self._kept[:, :, :0]
        self._start = self._end = 0

    @property
    def length(self) -> int:
        """Number of past positions still attended to."""
        return self._end - self._start

    def append(self, new: Sequence[Singles]) -> Singles:
        """Add the keys and the values of the next positions, each [heads, n, d_kv]; returns all."""
        count = new[0].shape[1]
        if self._end + count > self._kept.shape[2]:
            held = self._kept[:, :, self._start : self._end]
            room = min(max(2 * (self.length + count), self._kept.shape[2]), max(ROOM, self.length + count))
            kept = np.empty((2, held.shape[1], room, held.shape[3]), np.float32)
            kept[:, :, : self.length] = held
            self._start, self._end, self._kept = 0, self.length, kept
        self._kept[:, :, self._end : self._end + count] = new
        self._end += count
        return self._kept[:, :, self._start : self._end]

    def shorten(self) -> None:
        """Limit the next position to WINDOW - 1 past ones."""
        self._start = max(self._start, self._end - (WINDOW - 1))


class _Block:
    """One block's weights."""

    def __init__(self, weights: Mapping[str, Any], heads: int, d_kv: int) -> None:
        self.held = heads, d_kv
        self._norm, self._ff_norm = weights["norm.weight"], weights["ff_norm.weight"]
        self._qkv = np.concatenate([weights[f"attend.{part}.weight"] for part in "qkv"]).T
        self._o, self._wi, self._wo = (weights[f"{part}.weight"].T for part in ("attend.o", "wi", "wo"))
        self._cross = "cross_norm.weight" in weights
        if self._cross:
            self._cross_norm = weights["cross_norm.weight"]
            self._cross_q, self._cross_o = weights["cross.q.weight"].T, weights["cross.o.weight"].T
            self._cross_kv = np.concatenate([weights[f"cross.{part}.weight"] for part in "kv"]).T

    def reads(self, x: Singles) -> Singles:
        """Keys and values of a prompt's states [S, d]."""
        return self._split(x @ self._cross_kv, 2)

    def forward(self, x: Singles, pasts: Sequence[_Past], biases: Sequence[Singles]) -> Singles:
        """States [T, d] -> the next block's, text by text; of each its past, and the `bias` [heads, t, S] for all
        attended positions, these t included."""
        query, *new = self._split(_normed(x, self._norm) @ self._qkv, 3)
        outs = []
        for part, past, bias in _parts(pasts, biases):
            outs.append(_over(query[:, part], past.append([one[:, part] for one in new]), bias))
            past.shorten()
        x = x + np.concatenate(outs) @ self._o
        if self._cross:
            query = self._split(_normed(x, self._cross_norm) @ self._cross_q, 1)[0]
            outs = [_over(query[:, part], past.prompt, None) for part, past, _ in _parts(pasts, biases)]
            x = x + np.concatenate(outs) @ self._cross_o
        out: Singles = x + np.maximum(_normed(x, self._ff_norm) @ self._wi, 0.0) @ self._wo
        return out

    def _split(self, x: Singles, parts: int) -> Singles:
        """[T, parts * heads * d_kv] -> [parts, heads, T, d_kv]."""
        return x.reshape(len(x), parts, *self.held).transpose(1, 2, 0, 3)


def _parts(pasts: Sequence[_Past], biases: Sequence[Singles]) -> Iterator[tuple[slice, _Past, Singles]]:
    """Each text's rows, past and bias."""
    first = 0
    for past, bias in zip(pasts, biases, strict=True):
        yield slice(first, first + bias.shape[1]), past, bias
        first += bias.shape[1]


def _over(query: Singles, held: Singles, bias: Singles | None) -> Singles:
    """[T, heads * d_kv] attention of the queries [heads, T, d_kv] over keys and values `held` [2, heads, S, d_kv]."""
    scores = query @ held[0].transpose(0, 2, 1)
    if bias is not None:
        scores += bias
    scores -= scores.max(-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(-1, keepdims=True)
    found: Singles = (scores @ held[1]).transpose(1, 0, 2).reshape(query.shape[1], -1)
    return found


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
