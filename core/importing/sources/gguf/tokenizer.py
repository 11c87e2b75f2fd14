"""Builds a model's tokenizer from GGUF metadata and writes it in transformers' format.

transformers has its own conversion, which only newer versions do correctly for byte-level vocabularies; this one gives
the same files on all versions. Keys: llama.cpp's gguf-py; semantics: src/llama-vocab.cpp.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from core.errors import ModelError
from core.importing.sources.gguf.config_parts import special_token
from core.importing.sources.gguf.pretokenize import SPLITS, WHOLE
from core.system.gguf import damaged
from core.system.wording import reason

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # ids of token kinds
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
SPACE = "▁"
LISTS: Mapping[str, tuple[tuple[type, ...], bool]] = {
    "tokens": ((str,), True),
    "merges": ((str,), False),
    "token_type": ((int,), True),
    "scores": ((float, int), True),
}
"""Kinds of a list's values, and whether there is one for each token."""
FLAGS = ("add_space_prefix", "add_bos_token", "add_eos_token")
MOST_TOKEN = 1 << 12  # characters

Metadata = Mapping[str, Any]


def write_tokenizer(metadata: Metadata, directory: Path, file: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template; nothing if the file has no vocabulary.

    Raises ModelError, which names `file`, for unsupported kinds of vocabularies and pre-tokenizers, and for a
    vocabulary whose lists are inconsistent.
    """
    if metadata.get("tokenizer.ggml.model", "none") in ("none", "no_vocab"):
        return
    _check(metadata, file)
    try:
        tokenizer = _tokenizer(metadata)
        tokenizer.save_pretrained(directory)
    except (ModelError, OSError):
        raise
    except Exception as error:  # the tokenizers library raises plain Exception
        raise damaged(file, f"its vocabulary cannot be used ({reason(error)})") from error


def _tokenizer(metadata: Metadata) -> PreTrainedTokenizerFast:
    tokens = metadata["tokenizer.ggml.tokens"]
    special = {name: tokens[at] for name, key in SPECIAL.items() if (at := special_token(metadata, key)) is not None}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=build(metadata),
        clean_up_tokenization_spaces=False,
        model_max_length=metadata.get(f"{metadata['general.architecture']}.context_length"),
        **special,
    )
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _check(metadata: Metadata, file: Path) -> None:
    """Raises ModelError unless every list has the right type and the length of the token list."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError("This GGUF file has no vocabulary. Download it again.")
    for name, (kind, is_per_token) in LISTS.items():
        found = metadata.get(f"tokenizer.ggml.{name}")
        if found is None:
            continue
        if not isinstance(found, list) or not all(type(value) in kind for value in found):
            raise damaged(file, f"its tokenizer.ggml.{name} is not a list of {kind[0].__name__}")
        if is_per_token and len(found) != len(tokens):
            raise damaged(file, f"it has {len(tokens):,} tokens, but {len(found):,} {name}")
    if any(score != score for score in metadata.get("tokenizer.ggml.scores") or ()):
        raise damaged(file, "one of its tokens has a score that is not a number (NaN)")
    if (longest := max(map(len, tokens))) > MOST_TOKEN:
        raise damaged(file, f"one of its tokens has {longest:,} characters")
    for name, wanted in (
        ("tokenizer.ggml.model", str),
        ("tokenizer.ggml.pre", str),
        ("tokenizer.chat_template", str),
        *((f"tokenizer.ggml.{flag}", bool) for flag in FLAGS),
    ):
        if not isinstance(metadata.get(name, wanted()), wanted):
            raise damaged(file, f"its {name} is {metadata[name]!r:.40}")


def build(metadata: Metadata) -> Tokenizer:
    """The tokenizer with added tokens, and bos and eos where they are inserted automatically."""
    kind = metadata["tokenizer.ggml.model"]
    if kind == "gpt2":
        tokenizer, bos = _byte_level(metadata)
    elif kind == "llama":
        tokenizer, bos = _spaced(metadata, _by_score(metadata)), True
    elif kind == "gemma4":
        tokenizer, bos = _spaced(metadata, _merges(metadata)), True
    else:
        raise ModelError(
            f"This GGUF file has a vocabulary of the kind {kind!r}, which Moestro does not know (only "
            "gpt2, llama and gemma4). Import the model's safetensors version instead."
        )
    _add_tokens(tokenizer, metadata)
    _enclose(tokenizer, metadata, bos)
    return tokenizer


def _byte_level(metadata: Metadata) -> tuple[Tokenizer, bool]:
    """Byte-level BPE, and whether texts begin with bos by default."""
    pre = metadata.get("tokenizer.ggml.pre", "default")
    splits = SPLITS.get(pre)
    if splits is None:
        raise ModelError(
            f"This GGUF file cuts text in the way {pre!r}, which Moestro does not know, so its tokens "
            "would be wrong. Download a newer conversion, or import the model's safetensors version."
        )
    tokenizer = Tokenizer(models.BPE(_vocabulary(metadata), _merges(metadata), ignore_merges=pre in WHOLE))
    cuts = [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, pre in WHOLE


def _merges(metadata: Metadata) -> list[tuple[str, str]]:
    """The merges between tokens of the vocabulary, in order."""
    vocabulary = _vocabulary(metadata)
    return [
        (a, b)
        for a, b in map(_pair, metadata.get("tokenizer.ggml.merges", ()))
        if a in vocabulary and b in vocabulary and a + b in vocabulary
    ]


def _pair(merge: str) -> tuple[str, str]:
    """The two sides of a merge, separated by a space; a side is never empty, but may itself begin with one."""
    at = merge.find(" ", 1)
    return merge[:at], merge[at + 1 :]


def _by_score(metadata: Metadata) -> list[tuple[str, str]]:
    """SentencePiece's merges: the pair that forms the best-scored token is merged first."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.scores")
    if scores is None:
        raise ModelError("This GGUF file's vocabulary has no scores. Download it again.")
    kinds = _kinds(metadata)
    usable = {t for t, kind in zip(tokens, kinds, strict=True) if kind not in (UNKNOWN, CONTROL, USER_DEFINED)}
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        if token in usable:
            halves = ((token[:at], token[at:]) for at in range(1, len(token)))
            ranked += [(-score, len(a), len(b), a, b) for a, b in halves if a in usable and b in usable]
    ranked.sort(key=lambda entry: entry[:3])
    return [(a, b) for *_, a, b in ranked]


def _spaced(metadata: Metadata, merges: list[tuple[str, str]]) -> Tokenizer:
    """BPE over the whole text, in which spaces are written as another character. Falls back to bytes."""
    unknown = special_token(metadata, "unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=_vocabulary(metadata),
            merges=merges,
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else metadata["tokenizer.ggml.tokens"][unknown],
        )
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefixed else spaces
    plain = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*plain, decoders.Strip(" ", 1, 0)] if prefixed else plain)
    return tokenizer


def _vocabulary(metadata: Metadata) -> dict[str, int]:
    return {token: at for at, token in enumerate(metadata["tokenizer.ggml.tokens"])}


def _kinds(metadata: Metadata) -> list[int]:
    return metadata.get("tokenizer.ggml.token_type") or [1] * len(metadata["tokenizer.ggml.tokens"])


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata) -> None:
    """Tokens matched literally in the text: control tokens, which are omitted from shown text, and user-defined ones,
    which are shown."""
    tokens = list(zip(metadata["tokenizer.ggml.tokens"], _kinds(metadata), strict=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in tokens if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in tokens if k == USER_DEFINED])


def _enclose(tokenizer: Tokenizer, metadata: Metadata, bos_by_default: bool) -> None:
    """Begin texts with bos and end them with eos, where metadata requests that and names the token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    template: list[str] = ["$A"]
    named: list[tuple[str, int]] = []
    for kind, default, at in (("bos", bos_by_default, 0), ("eos", False, 2)):
        token = special_token(metadata, kind)
        if token is not None and metadata.get(f"tokenizer.ggml.add_{kind}_token", default):
            template.insert(at, tokens[token])
            named.append((tokens[token], token))
    if named:
        pair = [*template, *(f"{piece}:1" if piece != "$A" else "$B:1" for piece in template)]
        tokenizer.post_processor = processors.TemplateProcessing(single=template, pair=pair, special_tokens=named)
