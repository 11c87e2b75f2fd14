"""What a predictor sees, without a model: passes with given routing, and states that are random but always the same."""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from core.policy.predict import Prediction, Predictor
from core.policy.predict.base import Later, Net, State, union
from core.settings.registry import create

HIDDEN = 16


class Pass(NamedTuple):
    request: int
    ids: npt.NDArray[np.int64]


@dataclass
class Known:
    gate_recall: Any = None
    default_recall: Any = None
    defaults: Any = None
    maps: Any = None
    map_keys: Any = None


def random_known(layers: int, experts: int) -> Known:
    random = np.random.default_rng(5)
    return Known(
        np.array([np.nan, *random.random(layers - 1)]),
        None,
        np.ones((layers, experts, HIDDEN), np.float16),
        random.dirichlet(np.ones(experts), (7, layers)).astype(np.float16),
        random.standard_normal((7, HIDDEN)).astype(np.float16),
    )


class Looking:
    """One layer of a pass as a predictor sees it; -1 as it begins. States can be asked for only if `states`."""

    def __init__(self, one: Pass, layer: int, experts: int, states: bool = False, known: Known | None = None) -> None:
        self.layer, self.layers, self.experts = layer, len(one.ids), experts
        self.top_k, self.request = one.ids.shape[2], one.request
        self.ids: Sequence[Sequence[int]] = one.ids[layer].tolist() if layer >= 0 else []
        self.tokens: Sequence[int] = [token_of(row) for row in one.ids[0]]
        self.shares: Sequence[tuple[int, Sequence[int]]] = ()
        self.profile = known
        self._states = states
        self._count = one.ids.shape[1]

    @property
    def weights(self) -> Sequence[Sequence[float]]:
        return [[1.0 / self.top_k] * self.top_k for _ in self.ids]

    def ask(self, layers: Sequence[int], state: State = "hidden") -> npt.NDArray[np.float64]:
        return np.stack(
            [
                union(np.log1p(-self._random(of).dirichlet(np.ones(self.experts), self._count)).sum(0), self.top_k)
                for of in layers
            ]
        )

    def estimate(self, layer: int) -> npt.NDArray[np.float64]:
        return self.ask((layer,))[0]

    def distribution(self) -> Later:
        predicted = self._random(self.layer).dirichlet(np.ones(self.experts), self._count).mean(0).astype(np.float32)
        return Later(lambda: predicted)

    def embedding(self) -> Later:
        vectors = [np.random.default_rng(token).standard_normal(HIDDEN) for token in self.tokens]
        return Later(lambda: np.mean(vectors, 0).astype(np.float32))

    def path(self) -> Net:
        return drawn_path(self.layers, self.experts)

    def _random(self, of: int) -> np.random.Generator:
        assert self._states, "a state was asked for"
        return np.random.default_rng([zlib.crc32(str(self.tokens).encode()), of])


def drawn_path(layers: int, experts: int, d_model: int = 4, d_ff: int = 8, heads: int = 2, d_kv: int = 3) -> Net:
    """A routing-path network of one block with drawn weights, that knows the tokens 0 to 49."""
    random, wide = np.random.default_rng(3), heads * d_kv
    sizes = {
        "embed.weight": (51, d_model),
        "heads.weight": (layers * experts, d_model),
        "heads.bias": (layers * experts,),
        "reads.values.weight": (32, heads),
        "writes.values.weight": (32, heads),
        "read_norm.weight": (d_model,),
        "write_norm.weight": (d_model,),
    }
    for side, parts in (("encoder", ("attend",)), ("decoder", ("attend", "cross"))):
        sizes |= {
            f"{side}.0.{name}.weight": (d_model,)
            for name in ("norm", "ff_norm", "cross_norm")
            if name != "cross_norm" or side == "decoder"
        }
        sizes |= {f"{side}.0.wi.weight": (d_ff, d_model), f"{side}.0.wo.weight": (d_model, d_ff)}
        for part in parts:
            sizes |= {f"{side}.0.{part}.{name}.weight": (wide, d_model) for name in "qkv"}
            sizes[f"{side}.0.{part}.o.weight"] = (d_model, wide)
    weights: dict[str, Any] = {name: random.standard_normal(size).astype(np.float32) for name, size in sizes.items()}
    return (
        {
            "layers": layers,
            "experts": experts,
            "tokens": 50,
            "d_model": d_model,
            "d_ff": d_ff,
            "heads": heads,
            "d_kv": d_kv,
            "blocks": 1,
        },
        {**weights, "tokens": np.arange(50)},
    )


def token_of(row: npt.NDArray[np.int64]) -> int:
    return int((row * 31 ** np.arange(len(row))).sum() % 100)


def make(name: str, **params: float) -> Predictor:
    predictor: Predictor = create("predictor", name, params)
    predictor.patient = True
    return predictor


def random_passes(sizes: Sequence[tuple[int, int]], layers: int, experts: int, k: int, seed: int = 0) -> list[Pass]:
    """A pass for each (request, tokens)."""
    random = np.random.default_rng(seed)
    return [Pass(request, random.random((layers, tokens, experts)).argsort(-1)[..., :k]) for request, tokens in sizes]


def shown(
    predictor: Predictor, passes: Sequence[Pass], experts: int, known: Known | None = None
) -> Iterator[tuple[int, int, Sequence[Prediction]]]:
    """What it names at each layer of each pass; at -1 if it starts."""
    for at, one in enumerate(passes):
        if predictor.starts:
            yield at, -1, predictor.begin(Looking(one, -1, experts, predictor.asks, known))
        for layer in range(len(one.ids)):
            yield at, layer, predictor.predict(Looking(one, layer, experts, predictor.asks, known))
    predictor.close()
