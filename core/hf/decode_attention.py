"""Attention of one decoded token on a GPU by kernels of ours, in the place of torch's scaled_dot_product_attention.

The number of positions may be on the device alone, so that a CUDA graph needs neither a mask nor positions that are not
filled, and its bits are those of a token that the host leads. Attention modules that ask transformers' registry for
what computes attention are given ours where it says "sdpa"; what ours does not take is computed by torch as before:
several tokens, masks, several texts at once, and what a first trial finds to differ. Of torch's fused kernels flash
attention alone knows heads that share keys and values. Where it cannot compute a call (compute capability below 8.0,
builds without it, fp32) these are repeated first, as transformers does where there is a mask, or of one token the heads
that share them are its rows: else torch would take the plain formula, with copies of everything in fp32.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
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
        groups = getattr(module, "num_key_value_groups", 1)
        if groups > 1 and attention_mask is None and not _knows_groups(query, key, value, dropout):
            module = SimpleNamespace(is_causal=getattr(module, "is_causal", True))  # all that is asked of it
            if query.shape[2] == 1:  # the heads that share are as rows of one
                heads = query.view(len(query), key.shape[1], groups, query.shape[3])
                out, _ = sdpa_attention_forward(
                    module, heads, key, value, None, dropout, scaling, **{**more, "is_causal": False}
                )
                return out.transpose(1, 2).reshape(len(query), 1, query.shape[1], -1), None
            key, value = repeat_kv(key, groups), repeat_kv(value, groups)
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


def _knows_groups(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float) -> bool:
    """Whether torch computes a call without a mask, of heads that share keys and values, by a fused kernel."""
    if q.device.type != "cuda":
        return True  # a CPU's does
    asked = torch.backends.cuda.SDPAParams(q, k, v, None, dropout, q.shape[2] > 1, True)
    return bool(torch.backends.cuda.can_use_flash_attention(asked))


ATTENTION: Final = DecodeAttention()
