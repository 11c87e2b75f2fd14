"""Calibration texts: text files, chats, recorded routing, or the prompts bundled with Moestro."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from core.errors import ProfileError
from core.hf import chat_template
from core.system.reading import require_regular

Text = str | Sequence[Mapping[str, str]]
"""A text, or a chat: messages with "role" and "content"."""

ASSETS = Path(__file__).parents[2] / "assets"
MOST_BYTES = 1 << 30  # per file of texts
DEMO_CHATS = 400  # questions of the demo model's own set


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text as token ids; in a chat, the first `prompt` of them precede the last answer."""

    ids: npt.NDArray[np.int32]
    prompt: int


def bundled(model: str) -> list[Text]:
    """The bundled prompts: general ones, or the demo model's own questions with their answers."""
    if model != "demo":
        return from_file(ASSETS / "prompts.jsonl")
    rows = [json.loads(line) for line in (ASSETS / "demo" / "questions.jsonl").read_text("utf-8").splitlines()]
    return [
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        for row in rows[:: max(1, len(rows) // DEMO_CHATS)]
    ]


def from_path(path: Path) -> list[Text]:
    """Reads a text file, or every text file in a folder and below, ordered by name. Raises ProfileError."""
    if path.is_file():
        return from_file(path)
    if not path.is_dir():
        raise ProfileError(f"There is no file or folder {path}.")
    files = sorted(
        p
        for p in path.rglob("*")
        if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    )
    found = [text for file in files if _is_text(file) for text in from_file(file)]
    if not found:
        raise ProfileError(f"There is no text file in {path}. Name a folder with files in UTF-8.")
    return found


def from_file(path: Path) -> list[Text]:
    """One text; from a .jsonl file one per line: {"text": ...}, or {"messages": [{"role": ..., "content": ...}, ...]}.
    Raises ProfileError when it cannot be read."""
    try:
        require_regular(path, MOST_BYTES, ProfileError)
        text = path.read_text("utf-8-sig")
        found = [_row(line) for line in text.splitlines() if line.strip()] if path.suffix == ".jsonl" else [text]
    except OSError as error:
        raise ProfileError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path} is not a text in UTF-8. Name a text file, or save it as UTF-8.") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ProfileError(
            f'{path} is not understood ({error}). Each line must be {{"text": "..."}} or {{"messages": '
            '[{"role": "user", "content": "..."}]}.'
        ) from error
    found = [one for one in found if not isinstance(one, str) or one.strip()]
    if not found:
        raise ProfileError(f"{path} is empty. Name a file with text.")
    return found


def tokenize(tokenizer: PreTrainedTokenizerBase, text: Text) -> Tokens:
    """Token ids of a text or, through the model's template, of a chat with its answers. A chat that the template
    refuses, or any chat if the model has no template, is read as plain text."""
    if isinstance(text, str):
        ids = tokenizer(text, verbose=False).input_ids
        return Tokens(np.array(ids, np.int32), len(ids) // 2)
    answered = len(text) > 1 and text[-1]["role"] == "assistant"
    asked = _chat(tokenizer, text[:-1] if answered else text, opens=True)
    whole = _chat(tokenizer, text, opens=False) if answered else asked
    return Tokens(np.array(whole, np.int32), min(len(asked), len(whole)))


def shortened(texts: Sequence[Tokens], limit: int) -> list[Tokens]:
    """Texts from the first on, up to `limit` tokens in all."""
    found: list[Tokens] = []
    for text in texts:
        if limit <= 0:
            break
        found.append(Tokens(text.ids[:limit], min(text.prompt, limit)))
        limit -= len(text.ids)
    return found


def _chat(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], *, opens: bool) -> list[int]:
    text = "\n\n".join(message["content"] for message in messages)
    if tokenizer.chat_template is not None:
        try:
            text = chat_template.render(tokenizer, messages, add_generation_prompt=opens)
        except chat_template.Rejected:
            pass  # some require alternating roles, or have no system role: then it is read as plain text
    ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return ids


def _row(line: str) -> Text:
    row: Any = json.loads(line)
    if "text" in row:
        return str(row["text"])
    return [{"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"]]


def _is_text(path: Path) -> bool:
    """Whether a file is UTF-8 without NUL, judging by its beginning; an empty file is not."""
    with path.open("rb") as file:
        head = file.read(4096)
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if len(head) < 4096 or error.start < len(head) - 3:  # not just a character cut at the end
            return False
    return bool(head.strip()) and b"\0" not in head
