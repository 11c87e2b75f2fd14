"""A chat as the model's template writes it: with tools where it takes them, and with the reasoning that it begins."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from core.engine.prompt import Prompt
from core.errors import ContextError, PromptError
from core.types import Chat
from tests.tiny_tokenizer import TEMPLATE, save_tokenizer

TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}" + TEMPLATE
CALLS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments.at }}){% endfor %};{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def prompt(folder: Path, template: str | None) -> Prompt:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    return Prompt(tokenizer, SimpleNamespace(eos_token_id=None))


def test_tools_reach_a_template_that_takes_them(folder: Path) -> None:
    with_tools = prompt(folder, WITH_TOOLS)
    assert with_tools.takes_tools
    assert with_tools.text(Chat(HELLO, (TOOL,))) == "[look]u:hello\na:"
    assert with_tools.text(Chat(HELLO)) == with_tools.text(HELLO) == "u:hello\na:"
    for without in (TEMPLATE, None, "{{ raise_exception('no') }}", "{{ nothing.at.all }}"):
        assert not prompt(folder, without).takes_tools


def test_a_prompt_that_is_too_long_is_told_by_us_alone(folder: Path) -> None:
    """transformers' own warning of indexing errors, which nobody will see, is not printed."""
    long, said = prompt(folder, TEMPLATE), list[logging.LogRecord]()
    long.tokenizer.model_max_length = 8
    log, handler = logging.getLogger("transformers"), logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        with pytest.raises(ContextError, match="the context holds 16"):
            long.encode("a text of more than sixteen bytes", 16)
    finally:
        log.removeHandler(handler)
    assert not said


def test_calls_of_earlier_answers_reach_the_template(folder: Path) -> None:
    call = {"type": "function", "id": "", "function": {"name": "look", "arguments": {"at": "it"}}}
    chat = [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "seen"}]
    assert prompt(folder, CALLS).text(chat) == "user:hello;assistant:look(it);tool:seen;"


@pytest.mark.parametrize(
    ("end", "opens"), [("<think>", True), ("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("", False)]
)
def test_a_template_may_begin_the_reasoning(folder: Path, end: str, opens: bool) -> None:
    template = TEMPLATE + "{% if add_generation_prompt %}" + end.replace("\n", "{{ '\\n' }}") + "{% endif %}"
    assert prompt(folder, template).opens_reasoning is opens


def test_a_chat_that_the_template_refuses_is_the_asker_s_fault(folder: Path) -> None:
    with pytest.raises(PromptError, match="roles must alternate"):
        prompt(folder, "{{ raise_exception('roles must alternate') }}").text(HELLO)
