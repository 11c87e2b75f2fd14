"""The steps of a pass and the memory that they compute in, as `core.runtime.program.build` makes them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from core.hf.reserved_layers import Held
from core.memory.codec.fast.steps import Place, Steps
from core.memory.codec.native.team_code import LINE
from core.memory.codec.native.threads import acquire_team
from core.runtime.program.bind import Layer
from core.runtime.program.feed_forward import Routed
from core.runtime.program.mixer import ACCEPTED, Text
from core.runtime.program.routers import Answers


class Routing(NamedTuple):
    """What the router of a layer gives, of all rows, and where its experts are in the steps: the first that is not for
    routers, the one after those that look for slots, and the one after all of the layer."""

    layer: Layer
    rest: Routed
    logits: torch.Tensor  # [T, E] fp32
    ids: torch.Tensor  # [T, k] int64
    at: int  # where they begin among those of all layers
    weights: torch.Tensor  # [T, k] fp32
    answers: Answers | None = None  # None: no other routers are asked
    routed: int = 0
    looked: int = 0
    end: int = 0


class Rows(NamedTuple):
    """What the layers of a pass share: fp32, and written anew by each layer."""

    x: torch.Tensor  # [T, H], the residual stream
    normed: torch.Tensor  # [T, H]
    delta: torch.Tensor  # [T, H], what experts, or a dense layer in their place, add to it
    mixed: torch.Tensor  # [T, H], what the layer's mixer adds
    shared: torch.Tensor  # [T, H], what the expert that all tokens share adds
    shared_gate: torch.Tensor  # [T, 1]
    ones: torch.Tensor  # [T, 1]
    gates: torch.Tensor  # [T, 2 * inner] of a dense layer
    acts: torch.Tensor  # [T, inner]


class Built(NamedTuple):
    """The steps of a pass, and the memory that they compute in."""

    rows: Rows
    scratch: Mapping[tuple[str, int], torch.Tensor]  # what else its steps write
    steps: Steps
    routings: tuple[Routing, ...]
    ids: torch.Tensor  # int64: those of all layers, one after the other
    normed: torch.Tensor  # [kept, H], of which logits are computed
    tokens: int  # where the tokens are among the steps' arguments
    positions: int  # where their positions are
    embedded: int  # the first step after the one that writes the embeddings
    end: int  # the first one after the pass: from it on, states are brought up to date if they were held
    logits: int  # where the address of the logits is
    table: int  # where that of the experts' slots is
    hooks: tuple[Mapping[int, object], ...]  # those that want to see the experts of a layer
    bound: list[tuple[Held, ...]]  # the memory of the sequences that it is for
    kept: tuple[slice, ...]  # the rows of which logits are computed

    def bind(self, texts: Sequence[Text]) -> None:
        """It is for sequences in other memory of the same sizes."""
        for number, text in enumerate(texts):
            if text.held is not self.bound[number]:
                for layer, held in enumerate(text.held):
                    for at, address in enumerate(held.addresses):
                        self.steps.move((number, layer, at), address)
                self.bound[number] = text.held

    @property
    def holds(self) -> bool:
        """Whether states are what they were before the pass."""
        return self.end < len(self.steps)

    def settle(self, rows: int) -> None:
        """Bring them to what they are after the first so many rows."""
        self.steps.move(ACCEPTED, rows)
        with acquire_team() as team:
            self.steps.run(team, self.end)

    @property
    def looks(self) -> bool:
        """Whether the steps of a layer's experts are among its own."""
        return bool(self.routings) and self.routings[0].looked > self.routings[0].routed

    def chosen(self, begin: int, end: int) -> list[list[list[int]]]:
        """The experts of each row by the routings begin..end - 1."""
        every, found = self.ids.tolist(), list[list[list[int]]]()
        for one in self.routings[begin:end]:
            rows, k = one.ids.shape
            found.append([every[at : at + k] for at in range(one.at, one.at + rows * k, k)])
        return found


def placed(text: Text, number: int) -> Text:
    """A text, number so many of a pass, whose memory may be elsewhere in later ones."""
    return text._replace(
        held=tuple(
            held._replace(addresses=tuple(Place(one, (number, layer, at)) for at, one in enumerate(held.addresses)))
            for layer, held in enumerate(text.held)
        )
    )


class Memory:
    """Memory by name, which the next step of that name overwrites. `moved` counts how often any of it was elsewhere."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self.moved = 0

    def at(self, name: str, size: int) -> int:
        """The address of so many bytes."""
        kept = self._kept.get(name)
        if kept is None or kept.numel() < size + LINE:
            self.moved += kept is not None
            with torch.inference_mode(False):
                kept = self._kept[name] = torch.empty(size + LINE, dtype=torch.uint8)
        return kept.data_ptr() + -kept.data_ptr() % LINE


def hooks_around(routing: Routing) -> list[Mapping[int, object]]:
    """The hooks around a layer's experts, as they are at any time."""
    router, module = routing.rest.site.router, routing.rest.site.module
    before = routing.layer.after_module, router, module
    given = [one._forward_pre_hooks for one in before if one is not None]
    return [*given, router._forward_hooks, module._forward_hooks]
