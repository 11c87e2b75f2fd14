"""The texts that calibration reads, and those that it writes itself."""

import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from core.engine import Engine
from core.engine.texts import Tokens, bundled, from_path, shortened, tokenize
from core.errors import ProfileError
from core.measure.calibrate.gather import calibrate
from core.measure.calibrate.paths import Paths
from core.policy.predict.nets.path import Passage
from core.profile.summary import describe
from core.profile.trace import ArrayTrace
from core.settings.calibration import CalibrationSettings
from tests.profile.oracle import Oracle
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


TEXTS: list[Any] = [
    "An expert that is not asked is not loaded, and the others are.",
    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4, of course."}],
]
FEW = CalibrationSettings(path_tokens=200, path_answer=24)


@pytest.fixture(scope="module")
def truth(chat_model: Callable[[str], Path]) -> Oracle:
    return Oracle(chat_model("qwen3_moe"))


@pytest.fixture
def learnt(monkeypatch: pytest.MonkeyPatch) -> list[Passage]:
    found: list[Passage] = []
    passages = Paths.passages

    def kept(self: Paths) -> list[Passage]:
        found.extend(Passage(one.prompt, one.ids, one.routes.clone()) for one in passages(self))
        return passages(self)

    monkeypatch.setattr(Paths, "passages", kept)
    return found


def prompts(engine: Engine) -> list[list[int]]:
    read = [tokenize(engine.prompt.tokenizer, text) for text in TEXTS]
    return [one.ids[: one.prompt].tolist() for one in read]


def test_by_default_the_model_writes_what_is_learnt_from(engine: Engine, learnt: list[Passage], truth: Oracle) -> None:
    profile = calibrate(engine, TEXTS, parts={"path"}, settings=FEW)
    assert sum(len(one.ids) for one in learnt) == FEW.path_tokens == profile.tokens
    asked = prompts(engine)
    whole = learnt[:-1]  # the last one is as long as there was room
    assert [list(one.prompt) for one in whole] == [asked[at % len(asked)] for at in range(len(whole))]
    outputs = [list(one.ids)[len(one.prompt) :] for one in whole]
    assert all(list(one.ids)[: len(one.prompt)] == list(one.prompt) for one in whole)
    assert all(1 <= len(one) <= FEW.path_answer for one in outputs) and not any(
        {*one} & engine.prompt.ends for one in outputs
    )
    assert outputs[0] != outputs[len(asked)]  # the same prompt, drawn anew
    for one in learnt:
        passed = truth.read(list(one.ids))
        for layer in range(engine.shape.layers):
            assert one.routes[:, layer].long().sort(-1).values.tolist() == passed.ids[layer].sort(-1).values.tolist()
    assert profile.settings["path_texts"] == "generated"
    assert "trained on 200 tokens that the model wrote itself" in describe(profile)["path"]


@pytest.mark.long(0.1)
def test_it_writes_the_same_again(engine: Engine, learnt: list[Passage]) -> None:
    for _ in range(2):
        calibrate(engine, TEXTS, parts={"path"}, settings=FEW, limit=100)
    first, again = learnt[: len(learnt) // 2], learnt[len(learnt) // 2 :]
    assert [list(one.ids) for one in first] == [list(one.ids) for one in again]


def test_texts_can_be_learnt_as_they_are(engine: Engine, learnt: list[Passage]) -> None:
    profile = calibrate(engine, TEXTS, parts={"path"}, settings=CalibrationSettings(path_texts="read"))
    read = [tokenize(engine.prompt.tokenizer, text).ids.tolist() for text in TEXTS]
    assert [list(one.ids) for one in learnt] == read
    assert "trained on" in (said := describe(profile)["path"]) and "tokens read" in said


def test_the_most_tokens_to_read_are_the_most_to_write(engine: Engine, learnt: list[Passage]) -> None:
    calibrate(engine, TEXTS, parts={"path"}, settings=FEW, limit=70)
    assert sum(len(one.ids) for one in learnt) == 70


@pytest.mark.long(0.1)
def test_recorded_routing_counts_and_the_rest_is_written(engine: Engine, learnt: list[Passage]) -> None:
    ids = torch.rand(40, 3, 8).argsort(-1)[..., :4].numpy()
    trace = ArrayTrace(ids, 8, tok=torch.arange(40).numpy())
    calibrate(engine, TEXTS, parts={"path"}, traces=[trace], settings=FEW)
    assert list(learnt[0].ids) == list(range(40)) and learnt[0].routes.tolist() == ids.tolist()
    assert sum(len(one.ids) for one in learnt) == FEW.path_tokens
    learnt.clear()
    calibrate(engine, [], parts={"path"}, traces=[trace], settings=FEW)
    assert [list(one.ids) for one in learnt] == [list(range(40))]


@pytest.mark.long(0.1)
def test_a_disk_without_room_is_said_first(engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda where: usage(0, 0, (256 << 20) + 12 * 1000))  # 3 layers of 4
    with pytest.raises(ProfileError, match=r"set path_tokens to at most 1,000, or"):
        calibrate(engine, TEXTS, parts={"path"}, settings=CalibrationSettings(path_tokens=2000), folder=tmp_path)
    assert not engine.busy
    calibrate(engine, TEXTS, parts={"path"}, settings=FEW, folder=tmp_path)
    assert not [*tmp_path.iterdir()]
