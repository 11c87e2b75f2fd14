"""Products of rows by dense matrices, which stay where they are: several matrices by the same rows in one launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from core.memory.codec.fast.gpu.launch import OPTIONS, PREPARED_BLOCKS, TILE, has_tiles, tile_options
from core.memory.codec.kernels.products import ByTriton, Launcher, Starter
from core.memory.codec.matrix import Matrix

CHUNK = 32  # rows of x of a program
Ready = Mapping[tuple[object, ...], torch.Tensor]
"""A row as products take it, int32 [1, words], by `Form.of_x`: what need not be prepared any more."""
NOTHING: Ready = {}
TILED = 16  # rows of x from which tensor cores multiply codes: half of a tile


class Placed(NamedTuple):
    """A matrix, without the bias that its slot may have, at an address of the device."""

    matrix: Matrix
    address: int


class End(NamedTuple):
    """What the last program of a product of one row goes on with: a kernel with the arguments and constants of `joined`
    and, behind these, its own."""

    kernel: object
    given: tuple[object, ...]
    constants: Mapping[str, Any]


class DenseKernels:
    """What the dense products of a model share. Everything runs on the current stream. A result depends on nothing but
    its row of x and the weights. Raises ImportError."""

    def __init__(self, launcher: Launcher = ByTriton) -> None:
        from core.memory.codec.fast.gpu import form
        from core.memory.codec.fast.gpu.joined import joined
        from core.memory.codec.fast.gpu.prepare import prepare
        from core.memory.codec.fast.gpu.tiles import tiled_joined

        self._forms = form
        self._kernels: dict[object, object] = {"joined": joined, "prepare": prepare, "tiled": tiled_joined}
        self._launcher, self._starters = launcher, dict[object, Starter]()

    def by(self, placed: Sequence[Placed], bias: torch.Tensor | None = None) -> DenseProducts:
        """The product by such matrices; their results [T, all outputs] get `bias` [all outputs]."""
        return DenseProducts(self, placed, bias)

    def start(self, kernel: str | object, constants: Mapping[str, Any]) -> Starter:
        """A kernel of these constants, of which there is one for all layers."""
        key = kernel, *constants.values()
        found = self._starters.get(key)
        if found is None:
            options = tile_options(constants["J"].forms[0]) if kernel == "tiled" else OPTIONS
            found = self._starters[key] = self._launcher(self._kernels.get(kernel, kernel), {**constants, **options})
        return found


class DenseProducts:
    """x [T, in] -> [T, out], fp32: results of all matrices, one's after the other's."""

    def __init__(self, kernels: DenseKernels, placed: Sequence[Placed], bias: torch.Tensor | None) -> None:
        self._kernels, self._bias = kernels, bias
        forms = [kernels._forms.form(one.matrix._replace(bias=None)) for one in placed]
        groups: dict[tuple[object, ...], list[int]] = {}  # those that take x alike
        for number, one in enumerate(forms):
            groups.setdefault(one.of_x, []).append(number)
        self.outputs = sum(one.outputs for one in forms)
        self.takers = tuple([forms[some[0]] for some in groups.values() if forms[some[0]].bits])
        """A form of each kind that takes x in its own way."""
        begins = [sum(one.outputs for one in forms[:number]) for number in range(len(forms))]
        self._groups = [
            (
                *(
                    kernels._forms.Joined(tuple(forms[n] for n in some), tuple(begins[n] for n in some), tile)
                    for tile in (0, TILE["ROWS"])
                ),
                tuple(placed[n].address for n in some),
            )
            for some in groups.values()
        ]

    def __call__(self, x: torch.Tensor, ready: Ready = NOTHING, end: End | None = None) -> torch.Tensor:
        """As many launches as there are kinds of codes among the matrices; one that prepares x is before each but that
        of plain numbers, and of what is `ready`. Many rows are multiplied by codes in tiles, which changes no bit."""
        count = len(x)
        assert count == 1 or not (ready or end)
        out = torch.empty(count, self.outputs, dtype=torch.float32, device=x.device)
        for number, (joined, joined_tiled, bases) in enumerate(self._groups, 1):
            form, more = joined.forms[0], tuple[object, ...]()
            tiled = form.bits > 0 and count >= TILED and has_tiles(x.device)
            given = ready[form.of_x] if form.of_x in ready else self._prepared(form, x, tiled)
            if tiled:
                programs = joined_tiled.programs, -(-count // TILE["TOGETHER"])
                start = self._kernels.start("tiled", {**TILE, "J": joined_tiled})
            else:
                programs = joined.programs, -(-count // CHUNK)
                together = 1 if count == 1 else form.together
                kernel: object = "joined"
                constants: Mapping[str, Any] = {"TOGETHER": together, "CHUNK": CHUNK, "J": joined}
                if end is not None and number == len(self._groups):
                    kernel, more, constants = end.kernel, end.given, {**constants, **end.constants}
                start = self._kernels.start(kernel, constants)
            stride = given.stride(0) * given.itemsize
            start[programs](given, out, self._bias, bases, count, stride, self.outputs, *more)
        return out

    def _prepared(self, form: Any, x: torch.Tensor, tiled: bool) -> torch.Tensor:
        """Rows of x as the kernel takes them: int32 [T, words], or x itself for plain weights."""
        if not form.bits:
            return x
        into = torch.empty(len(x), form.prepared, dtype=torch.int32, device=x.device)
        start = self._kernels.start("prepare", {"BLOCKS": PREPARED_BLOCKS, "TILED": tiled, "F": form})
        start[-(-form.blocks // PREPARED_BLOCKS), len(x)](x, into, x.stride(0))
        return into
