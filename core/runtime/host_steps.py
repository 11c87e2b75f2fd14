"""One row through experts that lie in host memory, as steps of native calls that threads of their own compute."""

from collections.abc import Sequence
from typing import Any

import torch

from core.memory.codec import on_cpu
from core.memory.codec.fast.background import Background
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.threads import acquire_team
from core.runtime.expert_math import ExpertMath
from core.runtime.program.experts import ExpertKernels, FastMath, for_each

FP32 = torch.float32


class HostSteps:
    """Of so many experts: only their addresses, and the row, change from call to call."""

    def __init__(self, kernels: ExpertKernels, count: int, *, pin: bool) -> None:
        """`pin`: the row comes from a GPU, and the outputs go there."""
        self._x = torch.empty(1, kernels.hidden, dtype=FP32, pin_memory=pin)
        self.out = torch.empty(count, kernels.hidden, dtype=FP32, pin_memory=pin)
        self._memory = torch.empty(kernels.token_memory(count) + LINE, dtype=torch.uint8)
        memory = self._memory.data_ptr()
        memory += -memory % LINE
        self.steps, self._slots = kernels.begun(count)
        x, out, room = self._x.data_ptr(), self.out.data_ptr(), kernels.room_at(memory, count)
        self.steps.extend(kernels.row(self.steps, count, x, self._slots, out, memory, room))

    def begin(self, team: Background | None, hidden: torch.Tensor, blobs: Sequence[torch.Tensor]) -> None:
        """Begin to compute a row [1, H] with the experts in these blobs. Raises HostError."""
        self._x.copy_(hidden)
        self.steps.change(self._slots, [blob.data_ptr() for blob in blobs])
        if team is not None:
            team.post(self.steps)

    def end(self, team: Background | None) -> torch.Tensor:
        """The outputs [count, H], until the next `begin`. Raises HostError."""
        if team is not None:
            team.join()
            return self.out
        with acquire_team() as own:
            self.steps.run(own)
        return self.out


def host_kernels(math: Sequence[ExpertMath], modules: Sequence[Any]) -> list[ExpertKernels]:
    """Those of each layer for experts in host memory: on a CPU the layers' own, none in the reference arithmetic.
    Raises ModelError where there are none for a GPU's."""
    if math[0].codec.device.type == "cpu":
        return [one.kernels for one in math if isinstance(one, FastMath)]
    codecs = [one.codec for one in math]
    return [*for_each(modules, codecs, lambda module, codec: ExpertKernels(module, on_cpu(codec)))]
