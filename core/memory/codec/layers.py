"""The codecs of a model's experts by MoE layer: files mix formats, by layer and by matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from core.memory.codec.base import Codec


class LayerCodecs:
    """One codec for each MoE layer, the same object where layers are alike. All have the same blocks, compute dtype and
    device; bytes of a blob and of a slot differ between layers."""

    def __init__(self, codecs: Sequence[Codec], experts: int) -> None:
        """`experts`: of each layer."""
        self._codecs, self.experts = tuple(codecs), experts
        self.distinct = tuple(dict.fromkeys(self._codecs))  # in the order of their first layer
        first = self._codecs[0]
        self.blocks: int = first.blocks
        self.dtype: torch.dtype = first.dtype
        self.device: torch.device = first.device

    @classmethod
    def alike(cls, codec: Codec, layers: int, experts: int) -> LayerCodecs:
        """The same codec for each layer."""
        return cls([codec] * layers, experts)

    def __getitem__(self, layer: int) -> Codec:
        return self._codecs[layer]

    def __iter__(self) -> Iterator[Codec]:
        return iter(self._codecs)

    def __len__(self) -> int:
        """MoE layers."""
        return len(self._codecs)

    def of(self, eid: int) -> Codec:
        """That of an expert."""
        return self._codecs[eid // self.experts]

    def only(self, layers: int) -> LayerCodecs:
        """Those of the first so many layers."""
        return LayerCodecs(self._codecs[:layers], self.experts)

    @property
    def usual(self) -> Codec:
        """That of most layers; of as many, the first."""
        return Counter(self._codecs).most_common(1)[0][0]

    @property
    def verbatim(self) -> bool:
        """Whether all slots hold exactly the bytes of a blob."""
        return all(one.verbatim for one in self.distinct)

    @property
    def is_mixed(self) -> bool:
        """Whether slots of some layers need more bytes than those of others."""
        return len({one.slot_bytes for one in self.distinct}) > 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that holds a block of any expert."""
        return max(one.slot_bytes for one in self.distinct)

    @property
    def blob_bytes(self) -> int:
        """Bytes of the largest encoded expert."""
        return max(one.blob_bytes for one in self.distinct)

    @property
    def mean_blob_bytes(self) -> int:
        """Bytes of an encoded expert, on average over layers."""
        return sum(one.blob_bytes for one in self._codecs) // len(self._codecs)
