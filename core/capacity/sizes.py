"""Turns a budget into slots, from a model's outline alone.

Budget = dense weights + KV cache at the chosen context + workspace + slots. The same `Sizes` are used before the load,
while a slider moves, and when the engine resizes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import mul
from typing import Any, NamedTuple

from core.hf.outline import Outline
from core.memory.codec import Codec
from core.memory.codec.kernels import available, scratch_bytes
from core.memory.codec.layers import LayerCodecs
from core.memory.pages import page_up
from core.memory.slabs import slot_cost
from core.runtime.expert_math import AT_ONCE
from core.runtime.graph_pool import ROOM
from core.settings.budget import Budget
from core.settings.config import Settings
from core.system.text_config import text_config
from core.system.wording import format_bytes
from core.types import ModelShape

PREFILL_CHUNK = 2048  # most prompt positions for whose pass memory is reserved
LONGEST_CHUNK = 16384  # ... that are computed in one pass with memory borrowed from the slots
SHORT_CHUNK = 512  # ... however small the budget, and by passes that are measured
WORTH_SHARED, WORTH_BYTES = 1 / 4, 1 / 16  # of the slots' bytes: what longer chunks may add to the workspace, with a
# budget that is a share of the experts, and with one in bytes, where the workspace takes from the slots
LIBRARIES = 64 << 20  # on a GPU: what its libraries take for themselves, and what its allocator leaves unused
SCORES_LIMIT = 256 << 20  # chunks are halved while attention scores or layers' states would take more than this


class PromptPiece(NamedTuple):
    """So many positions of prompts that are computed in one pass, and the bytes of workspace that they need beyond what
    is reserved."""

    chunk: int
    extra: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of everything a load needs, for its formats, one context and one device."""

    shape: ModelShape
    dense: int
    kv: int
    workspace: int
    slot: int  # one block of an expert on the device, on average over layers where their slots differ
    blob: int  # one expert as a copy moves it, on average over layers
    chunk: int  # prompt positions computed in one forward pass
    carried: bool = True  # whether a pass continues from the previous pass's state; else a prompt is one pass
    blocks: int = 1  # of an expert, see core.memory.codec
    longer: tuple[
        PromptPiece, ...
    ] = ()  # pieces of a prompt that are more than `chunk` positions, see core.capacity.pieces
    graphs: int = 0  # that CUDA graphs of tokens need beside the workspace, where there can be any
    of_layer: tuple[int, ...] = ()  # a slot of each layer, where these differ

    @property
    def slots_all(self) -> int:
        """Slots that hold every expert."""
        return self.shape.total * self.blocks

    @property
    def fixed(self) -> int:
        """Device bytes needed at any budget."""
        return self.dense + self.kv + self.workspace

    def under(self, settings: Settings) -> Sizes:
        """With what the setting gpu_decode needs. Where layers share slots, each has room for any expert."""
        cache, found = settings.cache, self
        if self.of_layer and (cache.scope == "global" or cache.bypass):
            found = replace(found, slot=max(self.of_layer), of_layer=())
        return replace(found, workspace=self.workspace + self.graphs, graphs=0) if settings.link.captures else found

    def affordable(self, settings: Settings, budget: Budget) -> Sizes:
        """Without graphs where nobody has asked for them by name and a budget would be too small for their room."""
        needed = self.slots_min(settings.cache.scope)
        short = settings.link.decode == "auto" and self.under(settings).slots(budget) < needed <= self.slots(budget)
        return replace(self, graphs=0) if short else self

    def slots_min(self, scope: str) -> int:
        """Fewest slots that can compute: one token's experts, in every layer when each layer has its own; experts in
        blocks can be computed in the buffer that all layers share."""
        own = scope == "layer" and self.blocks == 1
        return self.blocks * self.shape.top_k * (self.shape.cached_layers if own else 1)

    def slots(self, budget: Budget) -> int:
        """Number of blocks that a budget pays for, at most all."""
        if budget.share is not None:
            return int(budget.share * self.slots_all + 1e-9)
        assert budget.bytes is not None
        return max(0, min(self.slots_all, (budget.bytes - self.fixed) // self.slot))

    def slots_of(self, budget: Budget, divide: Callable[[int], Sequence[int]]) -> int:
        """The same, where `divide` says how many each layer gets: those of layers with larger slots cost more."""
        slots = self.slots(budget)
        paid = slots * self.slot
        while self.of_layer and (over := self.taken(divide(slots)) - paid) > 0:
            slots -= max(1, over // max(self.of_layer))
        return slots

    def taken(self, slots: Sequence[int]) -> int:
        """Bytes of so many slots of each layer, or pool."""
        return sum(map(mul, slots, self.of_layer)) if self.of_layer else sum(slots) * self.slot

    def bytes(self, slots: int) -> int:
        """Total device bytes with that many slots."""
        return self.fixed + slots * self.slot

    def budget_bytes(self, budget: Budget) -> int:
        """The total bytes of a budget."""
        return budget.bytes if budget.bytes is not None else self.bytes(self.slots(budget))

    def problem(self, budget: Budget, scope: str, device_free: int) -> str:
        """Why this budget cannot work, in the user's words, or "". `device_free` = bytes available in all."""
        need = self.bytes(self.slots_min(scope))
        share = self.slots_min(scope) / self.slots_all
        if self.slots(budget) < self.slots_min(scope):
            short = f"It is {format_bytes(need - budget.bytes)} short. " if budget.bytes is not None else ""
            return (
                f"The budget {show(budget)} is too small: {short}This model needs at least {format_bytes(need)}, which "
                f"is {share * 100:.3g} % of its experts ({format_bytes(self.dense)} dense weights, "
                f"{format_bytes(self.kv)} KV cache, {format_bytes(self.workspace)} workspace, "
                f"{self.slots_min(scope) // self.blocks} experts of {format_bytes(self.shape.expert_bytes)})."
            )
        if (needed := self.budget_bytes(budget)) > device_free:
            return (
                f"The budget {show(budget)} asks for {format_bytes(needed)}, but only {format_bytes(device_free)} are "
                "free. Lower it, shorten the context, or close what else uses the memory."
            )
        return ""


def show(budget: Budget) -> str:
    """A budget as the user would write it."""
    return format_bytes(budget.bytes) if budget.bytes is not None else str(budget)


def sizes_of(
    outline: Outline,
    config: Any,
    codecs: LayerCodecs,
    context: int,
    paged: bool = False,
    rounded: tuple[int, int] = (0, 0),
    budget: Budget | None = None,
    sequences: int = 1,
    draft: tuple[int, int] = (0, 0),
) -> Sizes:
    """Sizes for one context and the formats of experts, with KV memory for `sequences` of it. `paged`: slots are whole
    pages (core.memory.arena); `rounded`: bytes of dense layers kept as codes; `draft`: bytes of the weights and the KV
    of a model that guesses tokens. The longest chunks are those that
    `budget` pays for."""
    slot, of_layer = page_up(codecs.slot_bytes) if paged else codecs.slot_bytes, tuple[int, ...]()
    if codecs.device.type == "cuda":
        slot = slot_cost(codecs.slot_bytes)
    elif codecs.is_mixed and codecs.blocks == 1:
        of_layer = tuple(page_up(one.slot_bytes) if paged else one.slot_bytes for one in codecs)
        slot = -(-sum(of_layer) // len(of_layer))
    site, text = outline.sites[0], text_config(config)
    shape = ModelShape(len(outline.sites), site.num_experts, site.top_k, outline.hidden, slot * codecs.blocks)
    shape = replace(shape, encoder_layers=outline.encoder_layers, heads=outline.heads)
    states, scores = outline.states, _scores_bytes(text, context)
    unpacked = max(map(_unpacked, codecs.distinct))
    libraries = LIBRARIES if codecs.device.type == "cuda" else 0

    def sizes(chunk: int) -> Sizes:
        """With chunks of `chunk` positions."""
        computing = chunk * scores + _workspace(outline, text, shape, context, chunk, codecs)
        return Sizes(
            shape,
            outline.dense_bytes - rounded[0] + draft[0],
            sequences * outline.kv_bytes(context) + (outline.state_bytes if sequences > 1 else 0) + draft[1],
            max(states.bytes(chunk) + (1 << 20), computing + max(unpacked, rounded[1])) + libraries,
            slot,
            codecs.mean_blob_bytes,
            chunk,
            states.carried,
            codecs.blocks,
            graphs=ROOM if codecs.device.type == "cuda" and codecs.blocks == 1 and available(codecs.device) else 0,
            of_layer=of_layer,
        )

    most = min(PREFILL_CHUNK, sequences * context)  # the prompts of several are read together
    if not states.carried:  # a prompt is computed in one pass
        return sizes(max(context, most))
    chunk = most
    while chunk > 32 and max(chunk * scores, states.bytes(chunk)) > SCORES_LIMIT:
        chunk //= 2
    while chunk > SHORT_CHUNK and not _pays(sizes(chunk), sizes(SHORT_CHUNK), budget or Budget(share=1.0)):
        chunk = max(SHORT_CHUNK, chunk // 2)
    found, longer = sizes(chunk), list[PromptPiece]()
    while chunk < min(LONGEST_CHUNK, sequences * context) and not outline.encoder_layers:
        chunk *= 2
        if max(chunk * scores, states.bytes(chunk)) > SCORES_LIMIT:
            break
        longer.append(PromptPiece(chunk, sizes(chunk).workspace - found.workspace))
    return replace(found, longer=tuple(longer))


def _pays(longer: Sizes, shorter: Sizes, budget: Budget) -> bool:
    """Whether a budget has room for the workspace of longer chunks. They fetch and unpack each expert less often."""
    worth = WORTH_SHARED if budget.bytes is None else WORTH_BYTES
    return longer.workspace - shorter.workspace <= worth * shorter.slots(budget) * shorter.slot


def _unpacked(codec: Codec) -> int:
    """Bytes of weights unpacked to compute a prompt when slots hold codes: one whole matrix at a time, or on a GPU as
    many as its kernels take at once."""
    if codec.whole is not None:  # whose blocks are joined first
        return codec.whole[0].slot_bytes + codec.whole[0].unpacked_bytes
    if codec.device.type == "cuda" and available(codec.device):
        return scratch_bytes(codec)
    return codec.unpacked_bytes


def _scores_bytes(config: Any, context: int) -> int:
    """Bytes of attention scores per query position that are written out: none with a fused kernel, else
    three fp32 copies."""
    qk, v = _most(config, "qk_head_dim"), _most(config, "v_head_dim")
    fused = config._attn_implementation != "eager" and qk == v
    return 0 if fused else 3 * _most(config, "num_attention_heads") * context * 4


def _most(config: Any, name: str) -> int:
    """The largest value of a number that may differ between layers; 0 where it is absent."""
    layers = getattr(config, "per_layer_config", None) or [config]
    return max(int(getattr(layer, name, None) or 0) for layer in layers)


def _workspace(outline: Outline, config: Any, shape: ModelShape, context: int, tokens: int, codecs: LayerCodecs) -> int:
    """Most bytes of activations alive at once in a chunk of `tokens`: attention, a MoE layer, or the logits.

    Counted from the tensors that each of the three holds, in fp32 where values are promoted; a test compares it with
    measured passes.
    """
    hidden, k, itemsize = shape.hidden, shape.top_k, codecs.dtype.itemsize
    widest = max(s.shape[0] * s.shape[1] // hidden for s in outline.sites[0].parts.values() if s.is_weight)
    heads = _most(config, "num_attention_heads")
    head = max(_most(config, name) for name in ("head_dim", "qk_head_dim", "v_head_dim", "d_kv")) or hidden // heads
    mixed = 4 * itemsize + 2 * 4  # of six rows, the two in norms and rotations
    residual = mixed * tokens * hidden
    attention = mixed * tokens * heads * head + (4 * heads * head + 2 * tokens) * context * itemsize
    pairs = (hidden * itemsize + 5 * 8) * tokens * k  # outputs of all experts, and the order of their rows
    one = 3 * tokens * hidden * itemsize + 3 * tokens * widest * 4  # an expert that all tokens chose
    at_once = min(tokens, max(1, AT_ONCE[codecs.device.type == "cuda"] // (k * hidden))) * k * hidden
    summed = at_once * (itemsize + 2 * 4 + max(itemsize, outline.weights_itemsize)) + tokens * hidden * itemsize
    experts = pairs + max(one, summed) + 16 * tokens * shape.experts
    logits = 4 * outline.vocab * 4
    return residual + max(attention, experts, logits) + (1 << 20)
