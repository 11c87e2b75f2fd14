"""A small dense model that guesses tokens for a larger one with the same tokens: what is known of it before its weights
are read."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from core.errors import ModelError, NotImported
from core.hf.cache import reserve
from core.hf.cached_pass import cached_pass
from core.hf.discover import is_experts
from core.hf.files import ModelFiles, ModelPath, check_model
from core.hf.outline import context_limit, dense_bytes
from core.hf.quantized_linear import Linear, linears
from core.hf.reserved_window import ReservedWindow
from core.hf.skeleton import meta_skeleton
from core.hf.text_to_text import empty_cache
from core.system.text_config import text_config
from core.system.wording import reason

POSITIONS = 2048  # of a text that it sees at most: the last ones
LEAST = 128  # of fewer, too many would be read again and again
IMPORTED = (
    "{} is quantized, or a GGUF file, and only MoE models are imported. Choose the plain safetensors version of a "
    "dense model."
)
EXPERTS = "{!r} is a Mixture-of-Experts model, whose guesses would need experts of their own. Choose a dense one."
STATES = "{!r} keeps states, of which no token can be taken back. Choose a model with attention alone."
SHORT = "it sees no more than {} tokens of a text, and {} are needed. Choose another one."
OTHER_TOKENS = (
    "The draft model {} has other tokens than the model: {!r} is number {} there and {} here. Choose a model with the "
    "same tokenizer, such as a small one of the same family."
)


@dataclass(frozen=True, slots=True)
class Draft:
    """A dense model that was checked, and what it takes."""

    files: ModelFiles
    vocab: int  # tokens that it has a row of embeddings for
    positions: int  # of a text that it sees at once
    weights: int  # bytes
    position_bytes: int  # of keys and values
    linears: tuple[Linear, ...]

    @property
    def kv(self) -> int:
        """Bytes of all keys and values."""
        return self.positions * self.position_bytes


def check_draft(path: ModelPath, dtype: torch.dtype) -> Draft:
    """Reads config and headers. Raises ModelError for a model that cannot guess tokens."""
    try:
        files = check_model(path)
    except NotImported:
        raise ModelError(IMPORTED.format(path)) from None
    meta = meta_skeleton(files, dtype)
    config, kind = text_config(meta.config), meta.config.model_type
    if any(map(is_experts, meta.modules())):
        raise ModelError(EXPERTS.format(kind))
    cache = empty_cache(meta.config)
    own = reserve(cache, 1)
    try:
        with torch.no_grad():
            cached_pass(meta, torch.zeros(1, 1, dtype=torch.long, device="meta"), cache)
    except Exception as error:  # the model's own code, run without weights
        raise ModelError(f"{kind!r} does not run without weights: {reason(error)}. Choose another model.") from error
    if not all(layer.cuttable(1) for layer in own):
        raise ModelError(STATES.format(kind))
    windows = [layer.sliding_window - 1 for layer in own if isinstance(layer, ReservedWindow)]  # can be cut until then
    positions = min(POSITIONS, context_limit(config), *windows)
    if positions < LEAST:
        raise ModelError(SHORT.format(positions, LEAST))
    weights, kv = dense_bytes(meta, meta, ()), sum(layer.growing_bytes for layer in own)
    return Draft(files, config.vocab_size, positions, weights, kv, linears(meta, ()))


def check_tokens(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, draft: ModelPath) -> None:
    """Raises ModelError unless two tokenizers number the same tokens alike. Of the tokens that were added to either,
    such as marks of chats, the other one may lack some."""
    ours, theirs = own.get_vocab(), other.get_vocab()
    added = {*own.get_added_vocab(), *other.get_added_vocab()}
    differing = [
        token
        for token in ours.keys() | theirs.keys()
        if ours.get(token) != theirs.get(token) and not (token in added and (token in ours) != (token in theirs))
    ]
    if differing:
        first = min(differing)
        raise ModelError(OTHER_TOKENS.format(draft, first, theirs.get(first, "none"), ours.get(first, "none")))
