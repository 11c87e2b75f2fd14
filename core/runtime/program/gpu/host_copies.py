"""Modules of a model on a GPU, copied to host memory one at a time: they are tried there, as those of a model on a CPU,
and what is bound of a copy is then bound of the original."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import nn

from core.hf.discover import ExpertsSite
from core.hf.quantized_linear import QuantizedLinear
from core.runtime.program.trial import Angles
from core.runtime.program.weights import NormWeight, Weight


class HostCopies:
    """As `core.runtime.program.bind.Place`, of a model on a device. Nothing keeps a copy once it was `placed`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._angles: dict[int, tuple[Angles, Angles]] = {}  # by the address of a table on the host
        self._forget()

    def _forget(self) -> None:
        self._copies: dict[int, Any] = {}  # by the id of an original
        self._originals: dict[int, Any] = {}  # by the id of a copy of a module
        self._at: dict[int, Any] = {}  # original tensors, or modules of codes, by the address of a copy

    def module(self, module: nn.Module) -> Any:
        """A copy of a module, with what is in it, that computes in host memory."""
        known: dict[int, Any] = {}
        for one in module.modules():
            if type(one) is QuantizedLinear:
                known[id(one)] = found = one.on_host()
                self._at[found.address] = one
        for tensor in (*module.parameters(), *module.buffers()):
            host = tensor.detach().to("cpu", copy=True)
            known[id(tensor)] = nn.Parameter(host, requires_grad=False) if isinstance(tensor, nn.Parameter) else host
            self._at[host.data_ptr()] = tensor
        for one in module.modules():
            if (config := vars(one).get("config")) is not None:
                known[id(config)] = config
        made = copy.deepcopy(module, known)
        self._copies |= known
        self._originals |= {id(known[id(one)]): one for one in module.modules() if id(one) in known}
        return made

    def site(self, site: ExpertsSite) -> ExpertsSite:
        """A site whose block was copied."""
        module, parent, router = (self._copies[id(one)] for one in (site.module, site.parent, site.router))
        self._originals[id(found := replace(site, module=module, parent=parent, router=router))] = site
        self._copies[id(found)] = found  # which keeps its id its own
        return found

    def placed(self, bound: Any) -> Any:
        """What was bound of copies, with the device's addresses and tensors."""
        found = self._of_device(bound)
        self._forget()
        return found

    def _of_device(self, one: Any) -> Any:
        if isinstance(one, torch.Tensor):
            return self._tensor(one)
        if isinstance(one, (nn.Module, ExpertsSite)):
            return self._originals[id(one)]
        if isinstance(one, Angles):
            return self._tables(one)
        if isinstance(one, Weight):
            original = self._at[one.slot]
            slot = original.address if type(original) is QuantizedLinear else original.data_ptr()
            bias = None if one.bias is None else self._tensor(one.bias)
            return replace(one, slot=slot, owner=original, bias=bias)
        if isinstance(one, NormWeight):
            original = self._at.get(one.at)
            if original is None and isinstance(one.owner, torch.Tensor):  # made of some
                original = one.owner.to(self._device)
            return replace(one, at=0 if original is None else original.data_ptr(), owner=original)
        if isinstance(one, tuple):
            parts = [self._of_device(part) for part in one]
            return type(one)(*parts) if hasattr(one, "_fields") else tuple(parts)
        if is_dataclass(one) and not isinstance(one, type):
            return replace(one, **{field.name: self._of_device(getattr(one, field.name)) for field in fields(one)})
        return one

    def _tensor(self, one: torch.Tensor) -> torch.Tensor:
        original = self._at.get(one.data_ptr())
        if isinstance(original, torch.Tensor) and original.shape == one.shape and original.dtype == one.dtype:
            return original.detach()
        return one.to(self._device)

    def _tables(self, of: Angles) -> Angles:
        """The angles of all layers of a kind are one table on the device."""
        at = of.cos.data_ptr()
        if at not in self._angles:  # with what has this address
            self._angles[at] = of, Angles(of.of, of.cos.to(self._device), of.sin.to(self._device))
        return self._angles[at][1]
