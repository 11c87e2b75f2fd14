"""The fast arithmetic's experts on the fake GPU: a CPU's kernels compute them, which have its bits, and some thousand
times as fast as Triton's interpreter. What a token tells the host, and waits for, goes through the same memory as on a
real GPU (core.runtime.host_join), so that whole histories of tokens can be joined. The layers around are torch's.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from core.errors import ModelError
from core.memory.codec import Codec, on_cpu
from core.memory.codec.fast.gpu.launch import Groups
from core.runtime.host_steps import HostSteps
from core.runtime.program.experts import ExpertKernels
from core.runtime.program.gpu.experts import Mail, Where
from core.runtime.program.gpu.mailbox import COUNT, DONE, IDS, LATE, PUBLISHED
from tests.fake_cuda.device import FakeCuda
from tests.fake_cuda.kernels import MAPPED, read_by_kernel
from tests.fake_cuda.mail import Mails, number_at


class FakeExperts:
    """In the place of core.runtime.program.gpu.experts.GpuExperts."""

    def __init__(self, module: Any, codec: Codec, fake: FakeCuda, mails: Mails) -> None:
        self._kernels, self._fake, self._mails = ExpertKernels(module, on_cpu(codec)), fake, mails
        self._steps: dict[int, HostSteps] = {}

    def token(self, where: Where, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)

        def launched() -> None:
            at = where.addresses if where.table is None else where.table[where.ids].tolist()
            out.copy_(_summed(self._rows(x, at), weights))

        return self._launch(launched, out)

    def with_host(
        self, mail: Mail, table: torch.Tensor, ids: torch.Tensor, first: int, x: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        out = torch.empty_like(x)

        def launched() -> None:
            at = table[ids].tolist()
            missing = [place for place, address in enumerate(at) if not address]
            if missing:
                self._publish(mail, [first + int(ids[place]) for place in missing], x)
            rows = torch.empty(len(at), x.shape[1])
            here = [place for place, address in enumerate(at) if address]
            rows[here] = self._rows(x, [at[place] for place in here])
            if missing:
                rows[missing] = self._awaited(mail, len(missing))
            out.copy_(_summed(rows, weights))

        return self._launch(launched, out)

    def outputs(self, groups: Groups, x: torch.Tensor, tiled: bool = False) -> torch.Tensor:
        out = torch.empty(len(groups.row), x.shape[1], device=x.device)

        def launched() -> None:
            bases, ends = groups.bases.tolist(), groups.ends.tolist()
            for expert, (begin, end) in enumerate(pairwise(ends)):
                for at in range(begin, end):
                    row = int(groups.row[at])
                    out[at] = self._rows(x[row : row + 1], [bases[groups.ids[expert]]])[0]

        return self._launch(launched, out)

    def outputs_at(self, addresses: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(addresses), x.shape[1], device=x.device)
        return self._launch(lambda: out.copy_(self._rows(x, addresses)), out)

    def summed(
        self, outputs: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        out = torch.empty(len(pairs), outputs.shape[1], dtype=dtype, device=outputs.device)

        def launched() -> None:
            for row, (places, own) in enumerate(zip(pairs, weights, strict=True)):
                out[row] = _summed(outputs[places.clamp(min=0)], own * (places >= 0))[0]

        return self._launch(launched, out)

    def _launch(self, call: Callable[[], object], out: torch.Tensor) -> torch.Tensor:
        """Compute now, and at every replay of a graph that is captured."""

        def launched() -> None:
            self._fake.faults.check("launch")
            with torch._C.DisableTorchFunction(), torch.inference_mode():
                call()

        launched()
        if (graph := self._fake.captures.current) is not None:
            graph.calls.append(launched)
        return out

    def _rows(self, x: torch.Tensor, addresses: Sequence[int]) -> torch.Tensor:
        """[experts, H] fp32: x [1, H] through experts at these addresses."""
        if not addresses:
            return torch.empty(0, x.shape[1])
        steps = self._steps.get(len(addresses))
        if steps is None:
            with torch.inference_mode(False):
                steps = self._steps[len(addresses)] = HostSteps(self._kernels, len(addresses), pin=False)
        read = [read_by_kernel(self._fake, address) for address in addresses]
        steps.begin(None, x, [SimpleNamespace(data_ptr=lambda at=at: at) for at in read])  # type: ignore[misc]
        return steps.end(None).clone()

    def _publish(self, mail: Mail, experts: Sequence[int], x: torch.Tensor) -> None:
        """As core.runtime.program.gpu.hosted has it."""
        at, row = mail.address - MAPPED, x.float().contiguous()
        for place, expert in enumerate(experts):
            number_at(at + IDS + 8 * place).value = expert
        number_at(at + COUNT).value = len(experts)
        ctypes.memmove(at + mail.form.x, row.data_ptr(), 4 * mail.form.width)
        mail.state[0] += 1
        number = int(mail.state[0])
        self._mails.published(at, number)
        number_at(at + PUBLISHED).value = number

    def _awaited(self, mail: Mail, count: int) -> torch.Tensor:
        """The host's outputs [count, H], or whatever is there after the time that kernels wait."""
        at, number, begun = mail.address - MAPPED, int(mail.state[0]), time.perf_counter_ns()
        while not mail.state[2] and number_at(at + DONE).value != number:
            if time.perf_counter_ns() - begun > mail.limit_ns:
                mail.state[2] = number_at(at + LATE).value = number
            time.sleep(0)
        if not mail.state[2]:
            self._mails.joined(at, number)
        memory = (ctypes.c_float * (count * mail.form.width)).from_address(at + mail.form.out)
        return torch.frombuffer(memory, dtype=torch.float32).view(count, mail.form.width).clone()


def _summed(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[1, H] fp32, in the router's order."""
    total = torch.zeros(1, rows.shape[1])
    for row, weight in zip(rows, weights, strict=True):
        total += weight * row
    return total


def fast_experts(fake: FakeCuda, patch: pytest.MonkeyPatch, *, watched: bool = True) -> None:
    """Engines that load on the fake GPU, which has `kernels`, compute experts like this. `watched`: what they and the
    host tell each other is known to the race detector; otherwise the host's native code is what attends to them."""
    mails = Mails(fake)
    if watched:
        mails.watching(patch)

    def refused(*_: object) -> None:
        raise ModelError("torch computes the layers around them on the fake GPU")

    patch.setattr("core.engine.pass_wiring.launcher_for", lambda device: None)
    patch.setattr(
        "core.engine.pass_wiring.gpu_experts", lambda module, codec, _: FakeExperts(module, codec, fake, mails)
    )
    patch.setattr("core.engine.pass_wiring.GpuProgram", refused)
