"""The arithmetic of all MoE layers of a model, with the products that trials on this machine chose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from core.memory.arena import Slot
from core.memory.codec import Codec
from core.memory.codec.kernels import make_kernels, say_unavailable
from core.runtime.compute import ExpertMath
from core.runtime.joined import JoinedMath, JoiningRoom
from core.runtime.kernel_trial import objection
from core.runtime.stacking import worth_stacking


def make_math(experts: Sequence[Any], codec: Codec) -> list[ExpertMath]:
    """One per experts module of the model; all read slots of `codec`."""
    kernels = make_kernels(codec)
    math = [ExpertMath(module, codec, kernels) for module in experts]
    _place(math)
    if codec.whole is not None:
        whole, blocks = codec.whole
        room, joined = JoiningRoom(whole, blocks), [ExpertMath(module, whole) for module in experts]
        _place(joined)
        for one, other in zip(math, joined, strict=True):
            one.joined = JoinedMath(other, room)
    return math


def _place(math: Sequence[ExpertMath]) -> None:
    placed = math[0].needs_places()
    for one in math:
        one.placed = placed


def choose_products(math: Sequence[ExpertMath], slots: Sequence[Slot], dtype: torch.dtype) -> None:
    """Try with filled `slots`, as many as a token uses, whether one stacked product per token pays off, or whether the
    grouped kernels are correct here."""
    if math[0].grouped is not None:
        if slots and (reason := objection(math[0], slots, math[0].inputs, dtype)):
            say_unavailable(reason)
            for one in math:
                one.grouped = None
        return
    if math[0].stack or math[0].codec.blocks > 1:
        return
    stack = worth_stacking(math[0], slots, math[0].inputs, dtype)
    for one in math:
        one.stack = stack
