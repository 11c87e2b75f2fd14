"""Where texts come from: files, folders, chats, and what comes with Moestro."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.errors import ProfileError
from core.measure.calibrate.texts import Tokens, bundled, from_path, shortened, tokenize
from tests.tiny_tokenizer import save_tokenizer


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8-sig")  # as some editors save it
    (tmp_path / "a.md").write_text("first: " + "ü" * 5000, encoding="utf-8")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("print('third')", encoding="utf-8")
    (tmp_path / "d.bin").write_bytes(b"\x00\x01text")
    (tmp_path / "e.txt").write_bytes("Grüße".encode("latin-1"))
    (tmp_path / "f.txt").write_text("  \n", encoding="utf-8")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "g.txt").write_text("hidden", encoding="utf-8")
    assert from_path(tmp_path / "b.txt") == ["second"]
    assert [str(text)[:7] for text in from_path(tmp_path)] == ["first: ", "second", "print('"]


def test_lines_of_chats(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    file = tmp_path / "chats.jsonl"
    file.write_text(
        json.dumps({"messages": chat}) + "\n\n" + json.dumps({"text": "plain", "id": 3}) + "\n", encoding="utf-8"
    )
    assert from_path(file) == [chat, "plain"]


@pytest.mark.parametrize(
    ("name", "data", "why"),
    [
        ("a.txt", b"\xff\xfe\x00", "not a text in UTF-8"),
        ("a.txt", b" \n", "is empty"),
        ("a.jsonl", b'{"text": "x"}\n{"texts": 3}\n', "not understood.*Each line must be"),
        ("a.jsonl", b"{", "not understood"),
        ("a.jsonl", b'["x"]', "not understood"),
        ("b", b"", "no file or folder"),
    ],
)
def test_what_cannot_be_read_is_said(name: str, data: bytes, why: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(data)
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(ProfileError, match=why):
        from_path(tmp_path / name)


def test_a_folder_without_texts_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\x00")
    with pytest.raises(ProfileError, match="no text file in"):
        from_path(tmp_path)


def test_what_comes_with_moestro() -> None:
    general = bundled("org/any-model")
    chats, texts = [t for t in general if not isinstance(t, str)], [t for t in general if isinstance(t, str)]
    assert len(general) >= 60 and len(chats) >= 20 and len(texts) >= 30
    assert all(chat[-1]["role"] == "assistant" and len(chat) % 2 == 0 for chat in chats)
    assert sum(map(len, texts)) > 15_000 and len({str(t) for t in general}) == len(general)
    own = bundled("demo")
    assert 300 < len(own) < 600 and all(not isinstance(t, str) and len(t) == 2 for t in own)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(save_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_a_chat_is_its_prompt_and_its_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    """The tiny template writes "u:...\\n" for each message and ends with "a:"."""
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    found = tokenize(tokenizer, chat)
    assert tokenizer.decode(found.ids.tolist()) == "u:Hi\na:Hello\na:"
    assert tokenizer.decode(found.ids[: found.prompt].tolist()) == "u:Hi\na:"
    asked = tokenize(tokenizer, chat[:1])
    assert asked.prompt == len(asked.ids) == len("u:Hi\na:")
    plain = tokenize(tokenizer, "ten tokens")
    assert len(plain.ids) == 10 and plain.prompt == 5 and plain.ids.dtype == np.int32
    bare = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    bare.chat_template = None
    assert tokenizer.decode(tokenize(bare, chat).ids.tolist()) == "Hi\n\nHello"
    bare.chat_template = "{{ raise_exception('whose turn is it?') }}"
    assert tokenizer.decode(tokenize(bare, chat).ids.tolist()) == "Hi\n\nHello"


def test_no_more_than_asked() -> None:
    texts = [Tokens(np.arange(4), 3), Tokens(np.arange(5), 4), Tokens(np.arange(6), 1)]
    found = shortened(texts, 6)
    assert [len(text.ids) for text in found] == [4, 2] and [text.prompt for text in found] == [3, 2]
    assert [len(text.ids) for text in shortened(texts, 99)] == [4, 5, 6]
