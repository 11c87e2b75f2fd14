"""Chat templates are programs of anybody's: they end in time and within memory, or are stopped with a clear error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.errors import ModelError
from core.hf import chat_template
from core.session.loading import load_tokenizer
from tests.tiny_tokenizer import TEMPLATE, save_tokenizer

CHAT = [{"role": "user", "content": "hi"}]
LOOP = "{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}"
SILENT = (
    "{% set x = namespace(a=[]) %}{% for i in range(100000) %}{% set x.a = x.a + [i] %}{% endfor %}{{ x.a | length }}"
)
GROWING = "{% set x = namespace(a='ab') %}{% for i in range(36) %}{% set x.a = x.a ~ x.a %}{% endfor %}"
BAD: list[tuple[str, str, str]] = [
    ("ten thousand million numbers", LOOP, "was stopped: it"),
    ("a loop that writes nothing", SILENT, "was stopped: it did not end within"),
    ("a text without end", "{{ lipsum(n=100000) }}", "was stopped: it"),
    ("a range beyond the sandbox's", "{% for i in range(10**9) %}x{% endfor %}", "fails: one of its numbers is too l"),
    ("doubled until memory ends", GROWING, "was stopped: it takes more than 256 MiB"),
    ("calls of itself", "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", "nested too deeply"),
    ("a division by zero", "{{ 1 / 0 }}", "fails: division by zero"),
    ("a loop that is not closed", "{% for m in messages %}", "damaged in line 1"),
    ("another file", "{% include 'x' %}", "fails: "),
    ("Python's inner parts", "{{ ''.__class__.__mro__ }}", "asks for what no template may have"),
    ("a filter that there is not", "{{ messages | nothing }}", "No filter named 'nothing'"),
]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.3)
    monkeypatch.setattr(chat_template, "MEMORY_BYTES", 256 << 20)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    (directory / "config.json").write_text('{"model_type": "qwen3_moe"}')
    return save_tokenizer(directory)


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return found


@pytest.mark.parametrize(("template", "words"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_stopped_at_load_and_in_a_chat(
    folder: Path, tokenizer: PreTrainedTokenizerBase, template: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = "was stopped" in words and "MiB" not in words  # or another limit than that of time has to be reached first
    monkeypatch.setattr(chat_template, "SECONDS", 0.05 if timed else 60.0)
    file = folder / "chat_template.jinja"
    kept = file.read_text()
    file.write_text(template)
    try:
        with pytest.raises(ModelError, match=f"chat template .*{words}"):
            load_tokenizer(folder)
    finally:
        file.write_text(kept)
    tokenizer.chat_template = template
    with pytest.raises(ModelError, match=rf"chat template .*{words}.*\. Download .* again"):
        chat_template.prompt_of(tokenizer, CHAT)
    assert sys.getprofile() is None


def test_what_a_template_says_itself_is_passed_on(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ raise_exception('Roles must take turns') }}"
    chat_template.check(tokenizer)  # another chat may please it
    with pytest.raises(ModelError, match=r"does not take this chat: Roles must take turns\. Start a new chat"):
        chat_template.prompt_of(tokenizer, CHAT)
    with pytest.raises(TemplateError, match="take turns"):
        chat_template.render(tokenizer, CHAT)


def test_a_sound_template_gives_what_transformers_gives(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = TEMPLATE
    long = [{"role": role, "content": "word " * 50} for _ in range(500) for role in ("user", "assistant")]
    for chat in (CHAT, long):
        wanted = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert chat_template.prompt_of(tokenizer, chat) == wanted


def test_more_text_than_anybody_reads(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "CHARACTERS", 1000)
    tokenizer.chat_template = "{{ 'x' * 1001 }}"
    with pytest.raises(ModelError, match="stopped: it makes more than 1,000 characters"):
        chat_template.prompt_of(tokenizer, CHAT)


FIRST = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
)
NEVER = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
WRITTEN = "{% endif %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (FIRST + WRITTEN, "s:Be brief.\n\nBe kind.|u:hi\n\nIt is late.|a:hello|u:well?|"),
        (NEVER + WRITTEN, "u:Be brief.\n\nBe kind.\n\nhi\n\nIt is late.|a:hello|u:well?|"),
        ("{% for m in messages %}{% if 0 %}" + WRITTEN, "s:Be brief.|s:Be kind.|u:hi|s:It is late.|a:hello|u:well?|"),
    ],
)
def test_system_messages_stand_where_the_template_takes_them(
    tokenizer: PreTrainedTokenizerBase, template: str, prompt: str
) -> None:
    tokenizer.chat_template = template
    said = (("system", "Be brief."), ("system", "Be kind."), *(("user", "hi"), ("system", "It is late.")))
    chat = [{"role": role, "content": text} for role, text in (*said, ("assistant", "hello"), ("user", "well?"))]
    assert chat_template.prompt_of(tokenizer, chat) == prompt
    assert chat[0] == {"role": "system", "content": "Be brief."}, "the chat itself is as it was"
