"""An upper bound on the text a context can hold, from its characters alone: tokenising ten million takes a minute.

A tokenizer's own pipeline shows how many characters one token may stand for. Most pipelines never shorten text before
they split it, so that the bound is the longest token of the vocabulary; steps that are known to shorten text are
allowed for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from core.errors import ContextError

COMPOSED = 4  # most code points that canonical composition (NFC, NFKC) merges into one
UNBOUNDED = 1000  # characters assumed per token where a token may stand for any number of them
NEVER_SHORTER = {"Prepend", "NFD", "NFKD", "ByteLevel", "Lowercase", "Metaspace", "Digits", "UnicodeScripts"}


@dataclass(frozen=True, slots=True)
class TextLimit:
    """`per_token`: most characters that one token stands for; white space is not counted when `skips_spaces`."""

    per_token: int
    skips_spaces: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> TextLimit:
        """The limit of a transformers tokenizer. Reads the whole vocabulary: cache the result."""
        found = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(found, Tokenizer):
            return cls(UNBOUNDED)
        factor, spaces = 1, any(one.lstrip or one.rstrip for one in found.get_added_tokens_decoder().values())
        for stage in [*_stages(found.normalizer), *_stages(found.pre_tokenizer)]:
            kind = stage["type"]
            if kind in ("NFC", "NFKC"):
                factor *= COMPOSED
            elif kind == "Strip":
                spaces = True
            elif kind == "Replace" and _kept(stage):
                factor *= -(-len(stage["pattern"]["String"]) // len(stage["content"]))
            elif kind not in NEVER_SHORTER and (kind not in ("Split", "Punctuation") or stage["behavior"] == "Removed"):
                return cls(UNBOUNDED)
        vocabulary = found.get_vocab(with_added_tokens=True)
        if not _says_everything(found, vocabulary):
            return cls(UNBOUNDED)
        return cls(factor * max(map(len, vocabulary), default=1), spaces)

    def check(self, text: str, context: int) -> None:
        """Raises ContextError when `context` tokens cannot hold `text`, whichever tokens they are."""
        if len(text) <= context:
            return
        characters = sum(map(len, text.split())) if self.skips_spaces else len(text)
        if characters > context * self.per_token:
            raise ContextError(
                f"The text has {characters:,} characters, more than any {context} tokens can hold, and "
                f"the context has {context}. Start a new chat, shorten the message, or load the model "
                "with a longer context."
            )


def _stages(component: Any) -> Iterator[dict[str, Any]]:
    """The steps of a normaliser or pre-tokeniser, from its serialised state."""
    if component is None:
        return
    try:
        config = json.loads(component.__getstate__())
    except Exception:  # a component written in Python has no serialised state
        config = {"type": "unknown"}
    waiting = [config]
    while waiting:
        one = waiting.pop(0)
        inner = one.get("normalizers") or one.get("pretokenizers")
        if inner is None:
            yield one
        else:
            waiting = [*inner, *waiting]


def _kept(stage: dict[str, Any]) -> bool:
    """Whether a replacement leaves some of the text it replaces, and that text has a known length."""
    return bool(stage["content"]) and bool(stage["pattern"].get("String"))


def _says_everything(tokenizer: Tokenizer, vocabulary: dict[str, int]) -> bool:
    """Whether every character has its own token or bytes, so that none is omitted or merged into one unknown token."""
    steps = [*_stages(tokenizer.normalizer), *_stages(tokenizer.pre_tokenizer)]
    model, kind = tokenizer.model, type(tokenizer.model).__name__
    if kind == "Unigram":
        falls_back = bool(json.loads(model.__getstate__())["byte_fallback"])
    elif kind == "BPE":
        if any(one["type"] == "ByteLevel" for one in steps):
            return vocabulary.keys() >= set(pre_tokenizers.ByteLevel.alphabet())
        if model.unk_token is not None and not model.fuse_unk:
            return True
        falls_back = bool(model.byte_fallback)
    else:
        falls_back = False
    return falls_back and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
