"""Executes a load plan: reads dense weights into a model without experts, and experts into their memory tier."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.capacity.fit import fit_of
from core.capacity.plan import Plan
from core.capacity.sizes import Sizes
from core.capacity.tier import open_store
from core.engine.prompt import Prompt
from core.errors import BudgetError, ModelError, ProfileError
from core.hf.checkpoint import CheckpointReader
from core.hf.discover import ExpertsSite, find_experts
from core.hf.draft import check_tokens
from core.hf.head import MtpHead, attached, head_of
from core.hf.quantized_linear import coded_layers, round_linears
from core.hf.skeleton import load_skeleton
from core.memory.pack import PackReader
from core.memory.pack.verify import check_dense
from core.memory.store import ExpertStore, HostStore
from core.profile import Profile
from core.profile.buddies import find
from core.system.process_memory import release_memory
from core.system.template_worker import RENDERER
from core.system.wording import format_bytes, reason
from core.types import ModelShape

log = logging.getLogger("moestro.load")

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory: the plan that was executed and what that gave. Nothing of it changes until it is unloaded."""

    plan: Plan
    model: Any  # transformers' model without its experts' weights
    prompt: Prompt
    store: ExpertStore  # the experts
    sites: tuple[ExpertsSite, ...]
    model_hash: str
    draft: Any = None  # a dense model of transformers that guesses tokens, if the plan has one
    beside: int = 0  # bytes of the GPU that were reserved for something else before it was loaded

    @property
    def sizes(self) -> Sizes:
        """Bytes of its parts, and slots by budget."""
        return self.plan.sizes

    @property
    def shape(self) -> ModelShape:
        """Layers, experts, top-k and width."""
        return self.plan.sizes.shape

    @property
    def head(self) -> MtpHead | None:
        """What drafts tokens, if the plan has it."""
        return head_of(self.model)

    @property
    def cached_sites(self) -> tuple[ExpertsSite, ...]:
        """All MoE layers whose experts are cached: those of the model, then those of its head."""
        own = None if self.head is None else self.head.site
        return self.sites if own is None else (*self.sites, own)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.plan.device


def load(plan: Plan, progress: Progress, cancel: threading.Event | None) -> LoadedModel:
    """Execute a load plan. The chat template's trial may still run (`Prompt.require_trial`). Raises BudgetError before
    reading anything when it does not fit, Cancelled when stopped."""
    if problem := fit_of(plan, forecast=False).problem:
        raise BudgetError(problem)
    if plan.note:
        log.warning("%s", plan.note)
    beside = 0
    if plan.device.type == "cuda":
        beside = torch.cuda.memory_reserved(plan.device)
        # cuDNN's attention plans anew for every length of a text: 57 ms on an H100, where others take as long as it
        # does for a length that it has seen (accept --only attention)
        torch.backends.cuda.enable_cudnn_sdp(False)
    progress("Reading dense weights", 0.0)
    tokenizer = load_tokenizer(plan.files.path)
    if plan.draft is not None:
        check_tokens(tokenizer, load_tokenizer(plan.draft.files.path), plan.draft.files.path)
    if tokenizer.chat_template is not None:
        RENDERER.start()
    model, draft = _dense(plan), _drafting(plan)
    prompt = Prompt(tokenizer, model.generation_config, text_to_text=plan.config.is_encoder_decoder)
    prompt.begin_trial()
    found = _with_experts(plan, model, prompt, progress, cancel)
    if plan.spec.dense != "checkpoint":
        progress("Rounding dense weights", 1.0)
        round_linears(model, plan.outline.linears, plan.spec.dense, plan.dtype, plan.device)
        model.to(plan.device)
    release_memory()
    if unpinned := found.store.unpinned_bytes:
        log.warning(
            "The system lets %s of the experts' %s of host memory be pinned. The others take longer to copy.",
            format_bytes(found.store.bytes - unpinned),
            format_bytes(found.store.bytes),
        )
    return replace(found, draft=draft, beside=beside)


def with_buddies(loaded: LoadedModel, profile: Profile | None) -> Profile | None:
    """The profile with the pack's buddy lists added; lists that cannot be used are logged."""
    plan = loaded.plan
    try:
        pack = plan.files.path if plan.pack is not None else None
        return find(profile, pack, loaded.model_hash, plan.spec.model)
    except ProfileError as error:
        log.warning("%s", error)
        return profile


def _with_experts(
    plan: Plan, model: Any, prompt: Prompt, progress: Progress, cancel: threading.Event | None
) -> LoadedModel:
    """Read the experts into their memory tier, unless the chat template turns out to fail."""
    pin, count = plan.device.type == "cuda", plan.sizes.shape.total

    def report(share: float) -> None:
        prompt.require_trial(wait=False)
        progress(f"Reading {count} experts", 0.1 + 0.9 * share)

    if plan.pack is not None:
        store = open_store(
            plan.tier,
            PackReader(plan.files.path, blocks=plan.codecs.blocks),
            plan.codecs,
            plan.sizes.shape.cached_layers,
            pin,
            report,
            cancel,
        )
        return LoadedModel(plan, model, prompt, store, tuple(find_experts(model)), plan.pack.model_hash)
    with attached(model):
        reader = CheckpointReader(model, plan.files)
    with reader:
        whole, experts = HostStore(plan.codecs, count, pin), plan.sizes.shape.experts
        whole.fill((reader.read(*divmod(eid, experts)) for eid in range(count)), report, cancel)
        return LoadedModel(plan, model, prompt, whole, tuple(find_experts(model)), reader.content_hash())


def _dense(plan: Plan) -> Any:
    """The model without its experts. While a pack's dense weights are read, they are checked against their checksum."""
    with ThreadPoolExecutor(1) as beside:
        checked = beside.submit(check_dense, plan.files.path, plan.pack) if plan.pack is not None else None
        first = plan.device if plan.spec.dense == "checkpoint" else "cpu"  # unrounded weights never go to a GPU
        model = load_skeleton(plan.files, plan.dtype, first, head=plan.outline.head_bytes > 0)
        for module in (model, *([head.layer] if (head := head_of(model)) is not None else [])):
            own_memory(module)
        if checked is not None:
            checked.result()
        return model


def _drafting(plan: Plan) -> Any:
    """The dense model that guesses tokens, or None."""
    if plan.draft is None:
        return None
    model = load_skeleton(plan.draft.files, plan.dtype, dense=True)
    own_memory(model)
    if plan.spec.dense != "checkpoint":
        round_linears(model, plan.draft.linears, plan.spec.dense, plan.dtype, plan.device)
        coded_layers(model).fast = True  # no bit of an answer depends on what it guesses
    return model


def own_memory(model: torch.nn.Module) -> None:
    """Copy dense weights out of the checkpoint's memory map: the file can then be moved or deleted, and products run on
    aligned addresses, so that results do not depend on a weight's position in the file."""
    for parameter in model.parameters():
        if parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises ModelError when it is missing or needs the model's own code."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except BaseException as error:  # transformers' code on untrusted files; a Rust panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{path} has no usable tokenizer: {reason(error)}. Put the model's tokenizer files beside its config.json."
        ) from error
    return tokenizer
