"""Store of expert maps with their embeddings, and which old map a new one replaces (FineMoE 4.1 to 4.4)."""

import numpy as np
import numpy.typing as npt

CAPACITY = 1000
DISTANCE = 3  # layers that the embedding represents in the redundancy; FineMoE's prefetch distance

Floats = npt.NDArray[np.float32]


class MapCollection:
    """At most `capacity` maps. When full, a new map replaces the old one that it makes most redundant, that with the
    largest RDY = d/L * cos(embeddings) + (L-d)/L * cos(maps).

    Memory: 4 * capacity * (L * E + H) bytes, and for n new ones at a time 4 * n * (L * E + H + capacity + n)."""

    def __init__(
        self, layers: int, experts: int, hidden: int, capacity: int = CAPACITY, distance: int = DISTANCE
    ) -> None:
        self._shape = layers, experts
        self._share = min(distance, layers) / layers
        self._maps = np.zeros((capacity, layers * experts), np.float32)
        self._keys = np.zeros((capacity, hidden), np.float32)
        self._count = 0

    def add(self, keys: Floats, maps: Floats) -> None:
        """Adds iterations in their order: embeddings [n, H] and router distributions [n, L, E]."""
        maps = maps.reshape(len(maps), -1)
        room = min(len(maps), len(self._maps) - self._count)
        fresh = slice(self._count, self._count + room)
        self._maps[fresh], self._keys[fresh] = maps[:room], keys[:room]
        self._count += room
        self._replace(keys[room:], maps[room:])

    def _replace(self, keys: Floats, maps: Floats) -> None:
        """Computes all redundancies in a few products, then carries over what each replacement changes."""
        if not len(maps):
            return
        old = self._redundancy(keys, maps, self._keys, self._maps)  # [n, capacity]
        new = self._redundancy(keys, maps, keys, maps)  # [n, n]
        owner: dict[int, int] = {}
        for i in range(len(maps)):
            at = int(old[i].argmax())
            owner[at] = i
            old[i + 1 :, at] = new[i + 1 :, i]
        for at, i in owner.items():
            self._keys[at], self._maps[at] = keys[i], maps[i]

    def _redundancy(self, keys: Floats, maps: Floats, old_keys: Floats, old_maps: Floats) -> Floats:
        return self._share * _cosines(keys, old_keys) + (1 - self._share) * _cosines(maps, old_maps)

    def maps(self) -> npt.NDArray[np.float16]:
        """[N, L, E]"""
        return self._maps[: self._count].reshape(-1, *self._shape).astype(np.float16)

    def keys(self) -> npt.NDArray[np.float16]:
        """[N, H]"""
        return self._keys[: self._count].astype(np.float16)


def _cosines(a: Floats, b: Floats) -> Floats:
    norms = np.linalg.norm(a, axis=-1)[:, None] * np.linalg.norm(b, axis=-1)
    found: Floats = (a @ b.T) / np.maximum(norms, np.float32(1e-30))
    return found
