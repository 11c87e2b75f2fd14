"""The experts of a layer on a GPU in the fast arithmetic: launches. Everything runs on the current stream, and nothing
waits for the host.

A token takes two launches: first products and activation of all its experts, whose last programs prepare hidden states,
and second products and their weighted sum. One more is before them where its state was not prepared by the norm before
it. A token that the host takes part in takes two more: it is told first, and waited for before the sum. Several tokens
take five: states and hidden states are prepared, and the sum is a launch of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from core.memory.codec.fast.gpu.dense import NOTHING, Ready
from core.memory.codec.fast.gpu.launch import MANY_REGISTERS, OPTIONS, GpuProducts, Groups
from core.memory.codec.kernels.products import BY_IDS, LANES, LANES_MOST, ByTriton, Launcher, Starter
from core.memory.codec.matrix import Matrix
from core.runtime.program.gate import Gate
from core.runtime.program.gpu.mailbox import Mailbox

WIDTH = 256  # numbers of a state that a program sums up


class Where(NamedTuple):
    """Where a token's experts are, in the router's order: `addresses` where the host knows, or, on the device, `ids`
    [chosen] int64 into a `table` [experts] int64 of addresses."""

    addresses: tuple[int, ...] = ()
    table: torch.Tensor | None = None
    ids: torch.Tensor | None = None


class Mail(NamedTuple):
    """What a GPU and the host tell each other: where, as kernels have the address, the counts on the device [3] int64
    (core.runtime.program.gpu.hosted), and nanoseconds after which a kernel does not wait any longer."""

    form: Mailbox
    address: int
    state: torch.Tensor
    limit_ns: int


class GpuExperts:
    """What the layers of a model share. `up` has gates and ups, as `gate` says. Raises ImportError."""

    def __init__(self, up: Matrix, down: Matrix, gate: Gate, launcher: Launcher = ByTriton) -> None:
        from core.runtime.program.gpu import combine, hosted
        from core.runtime.program.gpu.gate import gated

        self._kernels, self._hosted = combine, hosted
        self.up = GpuProducts(up, launcher, join=gated, spec=gate)
        self.down = GpuProducts(down, launcher)
        self._launcher, self._starters = launcher, dict[object, Starter]()
        self._ready: tuple[torch.Tensor, Ready] | None = None
        self.takers = (self.up.form,) if self.up.form.bits else ()
        """What takes a state in its own way: the form, if it does."""

    @contextmanager
    def given(self, x: torch.Tensor, ready: Ready, *, changed: bool) -> Iterator[None]:
        """Inside, what is `ready` of a state x need not be prepared, unless it may be `changed`."""
        self._ready = None if changed else (x, ready)
        try:
            yield
        finally:
            self._ready = None

    def token(self, where: Where, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [1, H] through its experts, whose outputs have `weights` [chosen] fp32 -> [1, H] of x's type."""
        chosen = len(weights)
        acts = self._acts(where, x)
        out = torch.empty_like(x)
        lanes = LANES if chosen <= LANES else LANES_MOST
        if where.ids is None:
            bases: object = where.addresses + where.addresses[-1:] * (lanes - chosen)
        else:
            bases, lanes = where.table, BY_IDS
        start = self._down(chosen, lanes)
        start[self.down.programs, 1](acts, out, bases, where.ids, weights, acts.stride(0) * acts.itemsize)
        return out

    def with_host(
        self, mail: Mail, table: torch.Tensor, ids: torch.Tensor, first: int, x: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """As `token`, where the host computes the experts `ids` [chosen] whose address in the `table` is 0. `first`:
        the number of the layer's first expert in the whole model."""
        chosen, out = len(weights), torch.empty_like(x)
        rows = torch.empty(chosen, dtype=torch.int64, device=x.device)
        constants = {"M": mail.form, "LANES": 1 << (chosen - 1).bit_length(), "BLOCK": 2 * WIDTH}
        publish = self._start(self._hosted.publish, mail.form, {**constants, **OPTIONS, "num_warps": 4})
        publish[1, 1](x, table, ids, rows, mail.state, mail.address, first)
        acts = self._acts(Where(table=table, ids=ids), x)
        outputs = self.down.by_ids(table, ids, acts, given=acts)
        constants = {"M": mail.form, "BLOCK": WIDTH, "LIMIT": mail.limit_ns, **OPTIONS}
        join = self._start(self._hosted.join, (*mail.form, mail.limit_ns), constants)
        join[-(-x.shape[1] // WIDTH), 1](outputs, rows, weights, mail.state, mail.address, out)
        return out

    def tokens(
        self, groups: Groups, x: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor, tiled: bool = False
    ) -> torch.Tensor:
        """x [T, H] -> [T, H] of x's type. `pairs` [T, chosen] int64: the place among the rows of `outputs` of each
        token's experts in the router's order, -1 for one that is left out; `weights` [T, chosen] fp32."""
        return self.summed(self.outputs(groups, x, tiled), pairs, weights, x.dtype)

    def outputs(self, groups: Groups, x: torch.Tensor, tiled: bool = False) -> torch.Tensor:
        """x [T, H] -> [rows of all experts, H] fp32, one expert's after the other's. `groups.row`: the token of each
        row of an expert. `tiled`: by tensor cores, which changes no bit."""
        each = torch.arange(len(groups.row), device=x.device)
        acts = self.up.several(groups, x, tiled=tiled)
        return self.down.several(groups._replace(row=each), acts, tiled=tiled)

    def outputs_at(self, addresses: Sequence[int], x: torch.Tensor) -> torch.Tensor:
        """x [1, H] through experts at these addresses -> [experts, H] fp32."""
        acts = self._acts(Where(tuple(addresses)), x)
        return self.down.at(addresses, acts, given=acts)

    def summed(
        self, outputs: torch.Tensor, pairs: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """[T, H] of a type: the rows `pairs` [T, chosen] of outputs [n, H] fp32 by their weights."""
        (count, chosen), width = pairs.shape, outputs.shape[1]
        out = torch.empty(count, width, dtype=dtype, device=outputs.device)
        start = self._start(
            self._kernels.combine, (chosen,), {"CHOSEN": chosen, "WIDTH": width, "BLOCK": WIDTH, **OPTIONS}
        )
        start[-(-width // WIDTH), count](outputs, pairs, weights, None, None, out)
        return out

    def _acts(self, where: Where, x: torch.Tensor) -> torch.Tensor:
        """[chosen, inner] fp32: the hidden states of a token's experts, or these prepared where weights are codes."""
        given, (own, ready) = None, self._ready or (None, NOTHING)
        if own is not None and own.data_ptr() == x.data_ptr() and own.shape == x.shape:
            given = ready.get(self.up.form.of_x)
        if where.ids is not None:
            assert where.table is not None
            return self.up.by_ids(where.table, where.ids, x, given=given, then=self.down)
        return self.up.at(where.addresses, x, given=given, then=self.down)

    def _down(self, chosen: int, lanes: int) -> Starter:
        experts = 1 << (chosen - 1).bit_length()
        constants = {
            "CHOSEN": chosen,
            "LANES": lanes,
            "EXPERTS": experts,
            "F": self.down.form,
            **OPTIONS,
            **MANY_REGISTERS,
        }
        return self._start(self._kernels.down, (chosen, lanes), {**constants, "num_warps": experts})

    def _start(self, kernel: object, key: tuple[int, ...], constants: dict[str, object]) -> Starter:
        found = self._starters.get((kernel, key))
        if found is None:
            found = self._starters[kernel, key] = self._launcher(kernel, constants)
        return found
