"""Chat templates are untrusted programs: they run in a process of their own, exactly as transformers runs them, and are
stopped there with a clear error, whatever they do."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import psutil
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from core.errors import PromptError
from core.hf import chat_template
from core.system.template_worker import RENDERER
from tests.hf.templates import CHATS, SHAPES, TOOL
from tests.selection import layered
from tests.tiny_tokenizer import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
CHAT = [{"role": "user", "content": "hi"}]
N = "{% set n = messages | length + 8 %}"  # 9, which is not known when the template is compiled
TIME, MEMORY, TEXT = (
    "stopped: it did not end within 0.3",
    "stopped: it takes more than 512 MiB",
    "stopped: it makes more",
)
DEEP = "fails: something in it is nested too deeply"
HOSTILE: dict[str, tuple[str, str]] = {
    "a power in one call of C": (N + "{{ n ** (n ** n) }}", TIME),
    "a power while it is compiled": ("{{ 9 ** (9 ** 9) }}", TIME),
    "a text of 10 GB while it is compiled": ("{{ 'a' * 10000000000 }}", MEMORY),
    "a text of 10 GB": (N + "{{ 'a' * (n * 10 ** 9) }}", MEMORY),
    "a list of 10 GB": (N + "{{ ([0] * (n * 10 ** 8)) | length }}", MEMORY),
    "a loop that writes nothing": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        TIME,
    ),
    "a loop that writes": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ b }}{% endfor %}{% endfor %}",
        f"({TIME}|{MEMORY})",
    ),
    "lists that grow": (
        "{% set x = namespace(a=[]) %}{% for i in range(99999) %}{% set x.a = x.a + [i] %}{% endfor %}",
        TIME,
    ),
    "a text that doubles": (
        "{% set x = namespace(a='ab') %}{% for i in range(36) %}{% set x.a = x.a ~ x.a %}{% endfor %}",
        f"({TIME}|{MEMORY})",
    ),
    "a list that holds itself twice, again and again": (
        "{% set x = namespace(a=[1]) %}{% for i in range(40) %}{% set x.a = [x.a, x.a] %}{% endfor %}"
        "{{ x.a | tojson }}",
        f"({TIME}|{MEMORY})",
    ),
    "wordwrap": (N + "{{ ('a ' * (n * 10 ** 6)) | wordwrap(2) | length }}", f"({TIME}|{MEMORY})"),
    "center": (N + "{{ 'a' | center(n * 10 ** 9) }}", MEMORY),
    "indent": (N + "{{ ('a\\n' * 10 ** 6) | indent(n * 10 ** 5) }}", f"({TIME}|{MEMORY})"),
    "format": (N + "{{ '%*d' | format(n * 10 ** 8, 1) }}", MEMORY),
    "format of a method": (N + "{{ ('{:' ~ n ~ '99999999}').format(1) }}", MEMORY),
    "batch": (N + "{{ 'a' | batch(n * 10 ** 8, 'b') | list | length }}", MEMORY),
    "join": (N + "{{ ([('a' * 10 ** 6)] * (n * 10 ** 3)) | join }}", MEMORY),
    "replace": (N + "{{ ('a' * 10 ** 6) | replace('a', 'b' * (n * 10 ** 4)) }}", MEMORY),
    "lipsum": ("{{ lipsum(n=100000) }}", f"({TIME}|{TEXT})"),
    "a number of many digits": (N + "{{ (n ** (10 ** 7)) % 7 }}{{ n ** (n ** n) }}", TIME),
    "a long text": (N + "{{ 'a' * (n * 2 * 10 ** 6) }}", TEXT),
    "a macro that calls itself": ("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}", DEEP),
    "two macros that call each other": (
        "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}{{ a() }}{% endmacro %}{{ a() }}",
        "fails: ",
    ),
    "brackets without end": ("{{ " + "[" * 5000 + "]" * 5000 + " }}", DEEP),
    "conditions without end": ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "(fails|is damaged|was stopped)"),
    "a list within lists": (
        "{% set x = namespace(a=[]) %}{% for i in range(5000) %}{% set x.a = [x.a] %}{% endfor %}{{ x.a | tojson }}",
        DEEP,
    ),
    "a range beyond the sandbox's": (
        "{% for i in range(10 ** 9) %}x{% endfor %}",
        "fails: one of its numbers is too l",
    ),
    "Python's inner parts": ("{{ ''.__class__.__mro__ }}", "asks for what no template may have"),
    "Python's inner parts by name": ("{{ ('' | attr('__class__')).__mro__ }}", "asks for what no template may have"),
    "a frame's globals": ("{{ raise_exception.__globals__.json }}", "asks for what no template may have"),
    "a format that looks into objects": (
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "asks for what no template may have",
    ),
    "a name of a namespace": (
        "{% set x = namespace() %}{% set x.__init__ = 1 %}",
        "asks for what no template may have",
    ),
    "a division by zero": ("{{ 1 / 0 }}", "fails: division by zero"),
    "a loop that is not closed": ("{% for m in messages %}", "is damaged in line 1"),
    "another file": ("{% include 'x' %}", "fails: "),
    "a filter without what it needs": (
        "{{ 'a' | slice }}",
        "fails: something in it is given what it",
    ),
    "an attribute that there is not": ("{{ (1).nothing() }}", "fails: one of its values has no 'nothing'"),
    "a filter that there is not": ("{{ messages | nothing }}", "No filter named 'nothing'"),
}
QUICK = {"a power in one call of C", "a text of 10 GB while it is compiled"}


@pytest.fixture(autouse=True)
def _little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RENDERER, "limits", replace(RENDERER.limits, cpu_s=0.3))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, bos_token="<s>", eos_token="</s>")
    return found


@pytest.mark.parametrize(
    "name", layered(HOSTILE, quick=lambda name: name in QUICK or "stopped" not in HOSTILE[name][1])
)
def test_a_hostile_template_is_answered_in_words(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    template, words = HOSTILE[name]
    tokenizer.chat_template = template
    before = psutil.Process().memory_info().rss
    with pytest.raises(PromptError, match=rf"chat template .*{words}.*\. Download .* again"):
        chat_template.prompt_of(tokenizer, CHAT)
    assert psutil.Process().memory_info().rss - before < 50 << 20
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat_template.prompt_of(tokenizer, CHAT) == "hi"


def test_nothing_is_compiled_here(tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("compiled here")

    monkeypatch.setattr(jinja2.Environment, "compile", refuse)
    tokenizer.chat_template = "{{ 'never seen ' * 2 }}{{ messages[0].content }}"
    chat_template.check(tokenizer)
    assert chat_template.prompt_of(tokenizer, CHAT) == "never seen never seen hi"


@pytest.mark.parametrize("name", SHAPES)
def test_what_is_written_is_what_transformers_writes(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    tokenizer.chat_template = SHAPES[name]
    for messages in CHATS.values():
        for options in options_of(messages):
            given = {key: value for key, value in options.items() if value is not None}
            try:
                wanted: object = tokenizer.apply_chat_template(messages, tokenize=False, **given)
            except jinja2.TemplateError as error:
                wanted = chat_template.Rejected if type(error) is jinja2.TemplateError else PromptError
            except Exception:
                wanted = PromptError
            try:
                found: object = chat_template.render(tokenizer, messages, **given)
            except (chat_template.Rejected, PromptError) as error:
                found = type(error)
            assert found == wanted


def test_the_worker_imports_little() -> None:
    """Four fifths of importing transformers is its table of models and its client of the hub."""
    script = """
import sys
from core.system.template_worker import prepare, encode
print(prepare()(encode([{"role": "user", "content": "hi"}], chat_template="{{ messages[0].content }}")).decode())
print([one for one in ("torch", "transformers.models", "transformers.utils.hub") if one in sys.modules])
"""
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout == "text\nhi\n[]\n"


def options_of(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    yield {"add_generation_prompt": True, "tools": [TOOL] if any("tool_calls" in one for one in messages) else None}
    yield {"add_generation_prompt": False}
    yield {"add_generation_prompt": True, "documents": [{"title": "T", "text": "a\nb"}], "enable_thinking": False}
    yield {"continue_final_message": True}
    yield {"add_generation_prompt": True, "bos_token": "<other>", "date_string": "today"}


def test_what_a_template_says_itself_is_passed_on(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = "{{ raise_exception('Roles must take turns') }}"
    chat_template.check(tokenizer)  # another chat may please it
    with pytest.raises(PromptError, match=r"does not take this chat: Roles must take turns\. Start a new chat"):
        chat_template.prompt_of(tokenizer, CHAT)
    with pytest.raises(chat_template.Rejected, match="take turns"):
        chat_template.render(tokenizer, CHAT)


@pytest.mark.parametrize(
    ("said", "passed_on"),
    [
        ("'I cannot unpack the tools of this <b>chat</b>.'", "I cannot unpack the tools of this <b>chat</b>"),
        ("'ValueError: NoneType'", "ValueError: NoneType"),
        ("'one\\n two\\x1b[2J \\u202ethree\\u2028four'", "one two [2J three four"),
        ("'y ' * (4 * 10 ** 7 * messages | length)", "y " * 150 + "..."),
        ("' ' * (10 ** 7 * messages | length)", "no reason was given"),
        ("joiner()", "no reason was given"),
    ],
)
def test_what_a_template_says_is_one_short_line(tokenizer: PreTrainedTokenizerBase, said: str, passed_on: str) -> None:
    tokenizer.chat_template = "{{ raise_exception(" + said + ") }}"
    with pytest.raises(chat_template.Rejected) as caught:
        chat_template.render(tokenizer, CHAT)
    assert str(caught.value) == passed_on


def test_a_chat_of_values_that_json_has_not_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    for value in ({1, 2}, deep):
        with pytest.raises(PromptError, match=r"cannot be given to the model's chat template: .* Use texts, numbers"):
            chat_template.render(tokenizer, [{"role": "user", "content": value}])
    while deep:  # or freeing it would end this process
        deep = deep[0]


@pytest.mark.parametrize(
    "reply", [b"", b"text", b"text\n\xff", b"other\nwords", b"\xff" * 1000, b"failed\n\xff" * 9999]
)
def test_a_reply_that_the_worker_does_not_give_is_an_error_of_few_words(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch, reply: bytes
) -> None:
    monkeypatch.setattr(RENDERER, "ask", lambda request: reply)
    if reply == b"text":
        assert chat_template.render(tokenizer, CHAT) == ""
        return
    with pytest.raises(PromptError, match=r"(was stopped: it broke|fails: )") as caught:
        chat_template.render(tokenizer, CHAT)
    assert len(str(caught.value)) < 3000


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
def test_system_messages_stand_where_taken(tokenizer: PreTrainedTokenizerBase, template: str, prompt: str) -> None:
    tokenizer.chat_template = template
    said = (("system", "Be brief."), ("system", "Be kind."), *(("user", "hi"), ("system", "It is late.")))
    chat = [{"role": role, "content": text} for role, text in (*said, ("assistant", "hello"), ("user", "well?"))]
    assert chat_template.prompt_of(tokenizer, chat) == prompt
    assert chat[0] == {"role": "system", "content": "Be brief."}, "the chat itself is as it was"
