"""Attention of one decoded token on a GPU by kernels of ours, in the place of torch's scaled_dot_product_attention.

The number of positions may be on the device alone, so that a CUDA graph needs neither a mask nor positions that are not
filled, and its bits are those of a token that the host leads. Attention modules that ask transformers' registry for
what computes attention are given ours where it says "sdpa"; what ours does not take is computed by torch as before:
several tokens, masks, several texts at once, and what a first trial finds to differ.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from core.hf.attention_launch import AttentionKernels, Shape, tried

REGISTRY: Final = "ALL_ATTENTION_FUNCTIONS"  # the name by which files of transformers know theirs
FILLED: Final = "filled"  # attribute of keys: the last position to attend to, [1] int64 on the device
OTHERS = ("position_bias", "softcap")  # of what sdpa takes or refuses: not computed here


class DecodeAttention:
    """In the place of transformers' registry of attention functions: what says "sdpa" there is `attend` here."""

    def __init__(self) -> None:
        self._made: dict[tuple[Shape, torch.device], AttentionKernels | None] = {}

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return self._ours(ALL_ATTENTION_FUNCTIONS.get_interface(name, default))

    def get(self, name: str, default: Callable[..., Any] | None = None) -> Callable[..., Any] | None:
        own = ALL_ATTENTION_FUNCTIONS.get(name, default)
        return None if own is None else self._ours(own)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._ours(ALL_ATTENTION_FUNCTIONS[name])

    def __getattr__(self, name: str) -> Any:
        return getattr(ALL_ATTENTION_FUNCTIONS, name)

    def _ours(self, own: Callable[..., Any]) -> Callable[..., Any]:
        return self.attend if own is sdpa_attention_forward else own

    def attend(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, None]:
        """As transformers' sdpa_attention_forward."""
        last = getattr(key, FILLED, None)
        if query.shape[2] == 1 and (attention_mask is None or last is not None):
            made = self._kernels(query, key, value, dropout, scaling, more)
            if made is not None:
                return made(query, key, value, last), None
        return sdpa_attention_forward(  # type: ignore[no-any-return]
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )

    def _kernels(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout: float,
        scaling: float | None,
        more: Mapping[str, Any],
    ) -> AttentionKernels | None:
        """What computes a call; None where torch does."""
        if q.device.type != "cuda" or dropout or q.shape[0] != 1:
            return None
        if any(more.get(name) is not None for name in OTHERS) or q.shape[1] % k.shape[1]:
            return None
        if any(one.stride(3) != 1 or one.dtype != q.dtype for one in (q, k, v)):
            return None
        scale = q.shape[3] ** -0.5 if scaling is None else float(scaling)
        shape = Shape(q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype, scale)
        key = shape, q.device
        try:
            return self._made[key]
        except KeyError:
            if torch.cuda.is_current_stream_capturing():  # a trial waits
                return None
            self._made[key] = made = tried(shape, q.device)
            return made


ATTENTION: Final = DecodeAttention()
