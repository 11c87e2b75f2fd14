"""A checked load: everything that is known before weights are read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from core.capacity.device import choose_device, passed_over, remark
from core.capacity.free_memory import host_free
from core.capacity.sizes import Sizes, sizes_of
from core.capacity.tier import Tier, choose_tier
from core.errors import ContextError, ModelError, NotImported
from core.hf.checkpoint import CheckpointReader
from core.hf.discover import ExpertsSite
from core.hf.draft import LEAST, Draft, check_draft
from core.hf.files import ModelFiles, check_model, model_path, stamp
from core.hf.head import detach, layer_of_head, may_have_head, objection
from core.hf.outline import Outline, outline
from core.hf.quantized_linear import rounded_bytes
from core.hf.safetensors_file import read_header
from core.hf.skeleton import meta_skeleton
from core.importing.job import refusal
from core.memory.codec import ExpertParts, PartSpec, in_blocks
from core.memory.codec.kernels import notice
from core.memory.codec.layers import LayerCodecs
from core.memory.pack import Manifest, pack_at
from core.memory.pack.verify import check
from core.memory.pages import page_up
from core.settings.budget import Budget
from core.settings.formats import FORMATS
from core.settings.loading import LoadSpec
from core.system.wording import format_bytes
from core.types import Memory

CLOSE = (
    "Exact up to rounding: some products of this model are rounded otherwise than in transformers, so logits may "
    "differ from its own in the last bits, by no more than {:.0e} of the largest in fp32 (found with a tiny "
    "random model; a large one was not compared)."
)
TEXT_TO_TEXT = (
    "Text to text: it sees the last message alone. It cannot be calibrated, and Analysis has no recordings of it."
)
SPLIT_SUMS = 2e-5
"""The same bound for experts in blocks on a GPU, whose outputs are added up in another order."""
SPLIT = (
    "Exact weights, split sums: an expert's output is the sum of its {} blocks', so that logits may differ from "
    "transformers' own in the last bits, by no more than {:.0e} of the largest in fp32 (found with tiny random models)."
)
FAST = (
    "Fast arithmetic: the answers' bits are those with everything resident, and differ slightly from transformers' "
    "own. If it does not know the model, the reference computes, and the model's status shows the reason."
)
HEAD = "With its head that predicts further tokens (MTP), for drafts: {} of the dense weights{}."
EXPERTS = ", and the last layer of the experts"
DRAFT = "With the draft model {}: {} of the dense weights, and {} of the KV cache."
NO_DRAFT = (
    "A draft model guesses tokens for the fast arithmetic on a CPU alone. Choose that, or leave the draft model out."
)
FAST_ON_GPU = "On a GPU it has run under an emulation alone, and its speed was never measured."
DEFAULT_CONTEXT = 8192  # when the model allows more and the user set none


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked load: everything that is known before a weight is read."""

    spec: LoadSpec
    files: ModelFiles
    outline: Outline
    config: Any
    device: torch.device
    dtype: torch.dtype
    context: int
    codecs: LayerCodecs  # of the MoE layers that are cached
    sizes: Sizes
    bytes_min: int  # the least budget, whatever the one asked for
    tier: Tier  # where experts are kept that are not on the device
    pack: Manifest | None  # of an expert pack; None: a checkpoint, whose experts are encoded into host memory
    draft: Draft | None  # a dense model that guesses tokens

    @property
    def paged(self) -> bool:
        """Whether slots are whole pages, which the disk can write into."""
        return self.tier.into_slots

    @property
    def format(self) -> str:
        """The experts' format, or those of their matrices: "q4_k+q6_k"."""
        return self.pack.format if self.pack is not None else self.spec.format

    @property
    def compute_type(self) -> str:
        """The number type of activations: "bfloat16", "float16" or "float32"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def note(self) -> str:
        """Notes for the user on how this model is run; "" = all of it, exactly."""
        parts = self.outline.left_out
        verb = "are" if len(parts) > 1 else "is"
        text = f"Text only: {', '.join(parts)} of this model {verb} not loaded." if parts else ""
        close = CLOSE.format(self.outline.closeness) if self.outline.closeness else ""
        split = SPLIT.format(self.codecs.blocks, SPLIT_SUMS) if self._sums_blocks else ""
        device = remark(self.device, self.dtype) or (passed_over(self.spec.device) if self.device.type == "cpu" else "")
        own, experts = self.outline.head_bytes, EXPERTS if self.outline.heads else ""
        head = HEAD.format(format_bytes(own), experts) if own else ""
        draft = self.draft
        small = "" if draft is None else DRAFT.format(draft.files.path, *map(format_bytes, (draft.weights, draft.kv)))
        turns = TEXT_TO_TEXT if self.outline.encoder_layers else ""
        fast = "" if self.spec.arithmetic != "fast" else f"{FAST} {FAST_ON_GPU}" if self.device.type == "cuda" else FAST
        return " ".join(filter(None, (text, turns, head, small, fast, close, split, notice(self.device), device)))

    @property
    def weights(self) -> str:
        """The format of what is kept in fewer bits than the checkpoint's own numbers, experts first; "" = nothing."""
        experts = "" if all(one.is_plain for one in self.codecs.distinct) else self.format
        return experts or ("" if FORMATS[self.spec.dense].is_plain else self.spec.dense)

    @property
    def closeness(self) -> float:
        """Largest difference of the reference's logits from transformers' own with nothing lossy on, as a share of the
        largest logit; 0.0 = bit for bit the same."""
        return max(self.outline.closeness, SPLIT_SUMS if self._sums_blocks else 0.0)

    @property
    def _sums_blocks(self) -> bool:
        """Whether an expert's output may be the sum of its blocks': by a GPU's kernels."""
        return self.codecs.blocks > 1 and self.device.type == "cuda"


def plan(spec: LoadSpec, instead_of: Memory | None = None) -> Plan:
    """Reads config and headers only. Raises ModelError, ContextError or BudgetError."""
    path = model_path(spec.model)
    pack = _pack(path, stamp(path)) if pack_at(path) else None
    try:
        files = check_model(path)
    except NotImported:
        if why := _refusal(path, stamp(path)):
            raise ModelError(why) from None
        raise
    device = choose_device(spec.device)
    shape, config, dtype = _outlined(path, stamp(path), spec.dtype, _wants_head(spec, files, pack, device))
    context = choose_context(spec.context, shape.context_limit)
    site = shape.sites[0]
    if pack is not None:
        check_fits(pack, shape.sites, path, shape.heads)
    layers = len(shape.sites) + shape.heads
    if pack is not None:
        codecs = pack.codecs(dtype, device, spec.blocks).only(layers)
    else:
        parts = ExpertParts(site.parts, site.is_transposed, site.has_gate, site.is_concatenated)
        codec = in_blocks(spec.format, experts=parts, blocks=spec.blocks, dtype=dtype, device=device)
        codecs = LayerCodecs.alike(codec, layers, site.num_experts)
    total = layers * site.num_experts
    tier = Tier("all", total, codecs.blob_bytes, False)
    if pack is not None:
        into_slots = codecs.verbatim and codecs.blocks == 1
        row_bytes = max(pack.padded_bytes, page_up(codecs.blob_bytes))
        everything = sum(max(pack.kind(at).padded_bytes, page_up(codecs[at].blob_bytes)) for at in range(layers))
        free = host_free(device, instead_of)
        tier = choose_tier(spec.host, device, total, row_bytes, into_slots, free, everything * site.num_experts)
    rounded = rounded_bytes(shape.linears, spec.dense, dtype, device) if spec.dense != "checkpoint" else (0, 0)
    cache, draft = spec.settings.cache, _draft(spec, device, dtype, context)
    beside = (0, 0) if draft is None else (draft.weights, draft.kv)

    def sizes(budget: Budget) -> Sizes:
        found = sizes_of(shape, config, codecs, context, tier.into_slots, rounded, budget, spec.sequences, beside)
        return found.affordable(spec.settings, budget)

    least = sizes(Budget(share=0.0)).under(spec.settings)
    bytes_min = least.bytes(least.slots_min(cache.scope))
    found = sizes(cache.budget)
    return Plan(spec, files, shape, config, device, dtype, context, codecs, found, bytes_min, tier, pack, draft)


def check_fits(pack: Manifest, sites: Sequence[ExpertsSite], path: Path, heads: int = 0) -> None:
    """Raises ModelError unless the pack holds the experts that its config.json describes, and those of so many
    heads."""
    site = sites[0]
    if (pack.layers - pack.heads, pack.experts) != (len(sites), site.num_experts) or heads > pack.heads:
        raise ModelError(
            f"The pack {path} holds {pack.layers - pack.heads} x {pack.experts} experts, its config.json "
            f"says {len(sites)} x {site.num_experts}. Import the model again."
        )
    for name, held, expected in (
        ("experts a token uses", pack.top_k, site.top_k),
        ("parts of an expert", _shapes(pack.parts), _shapes(site.parts)),
        ("order of a matrix", pack.is_transposed, site.is_transposed),
        ("gate", pack.has_gate, site.has_gate),
        ("order of gate and up", pack.is_concatenated, site.is_concatenated),
    ):
        if held != expected:
            raise ModelError(
                f"The pack {path} is not of the model that its config.json describes: they differ in the "
                f"{name} ({held} and {expected}). Import the model again."
            )


def _shapes(parts: Mapping[str, PartSpec]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(spec.shape) for name, spec in parts.items()}


def choose_context(requested: int, limit: int) -> int:
    """The context to reserve, at least 2 tokens. Raises ContextError when `requested` is 1, or exceeds the model's
    limit."""
    if requested == 1:
        raise ContextError("A context of 1 token has no room for an answer. Set it to 2 or more, or to 0.")
    if requested > limit:
        raise ContextError(f"The context of {requested} tokens is longer than the {limit} that this model can take.")
    return requested or min(limit, DEFAULT_CONTEXT)


@lru_cache(maxsize=4)
def _refusal(path: Path, changed: tuple[int, ...]) -> str:
    """Why the model cannot be imported either; "" if it can."""
    return refusal(path)


@lru_cache(maxsize=4)
def _pack(path: Path, changed: tuple[int, ...]) -> Manifest:
    """The manifest of a pack, checked for completeness as far as possible without reading weights."""
    return check(path)


def _draft(spec: LoadSpec, device: torch.device, dtype: torch.dtype, context: int) -> Draft | None:
    """The dense model that is to guess tokens, if there is one. Raises ModelError where it cannot."""
    if not spec.draft:
        return None
    if device.type != "cpu" or spec.arithmetic == "reference":
        raise ModelError(NO_DRAFT)
    path = model_path(spec.draft)
    try:
        found = _checked_draft(path, stamp(path), dtype)
        saved = 0 if spec.dense == "checkpoint" else rounded_bytes(found.linears, spec.dense, dtype, device)[0]
    except ModelError as error:
        raise ModelError(f"The draft model cannot be used: {error}") from error
    return replace(found, positions=min(found.positions, max(context, LEAST)), weights=found.weights - saved)


@lru_cache(maxsize=4)
def _checked_draft(path: Path, changed: tuple[int, ...], dtype: torch.dtype) -> Draft:
    return check_draft(path, dtype)


def _wants_head(spec: LoadSpec, files: ModelFiles, pack: Manifest | None, device: torch.device) -> bool:
    """Whether the model's head is to be loaded, if it is of a known kind."""
    used = spec.arithmetic != "reference" and spec.blocks == 1 and device.type == "cpu"
    if not (used and spec.settings.drafts.by_head):
        return False
    if pack is not None:
        return pack.heads > 0 or may_have_head({name for file in files.weights for name in read_header(file)[0]})
    return _has_head(files.path, stamp(files.path))


@lru_cache(maxsize=4)
def _has_head(path: Path, changed: tuple[int, ...]) -> bool:
    """Whether a checkpoint has a head that can be loaded."""
    files = check_model(path)
    names = {name for file in files.weights for name in read_header(file)[0]}
    try:
        if not may_have_head(names):
            return False
        meta = meta_skeleton(files, head=True)
        with CheckpointReader(meta, files) as reader:
            return objection(meta.config, names) == "" and not reader.lacking(layer_of_head(meta.config))
    except ModelError:  # of another kind
        return False


@lru_cache(maxsize=4)
def _outlined(path: Path, changed: tuple[int, ...], dtype: str, head: bool) -> tuple[Outline, Any, torch.dtype]:
    """(outline, config, dtype) of a model as it is now; cached, as a slider asks many times a second."""
    meta = meta_skeleton(path, None if dtype == "auto" else getattr(torch, dtype), head=head)
    if head:
        detach(meta)
    return outline(meta), meta.config, meta.dtype
