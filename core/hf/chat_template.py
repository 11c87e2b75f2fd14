"""Runs a model's chat template within limits: it is untrusted code from the model and may never terminate.

jinja's sandbox, in which transformers runs it, blocks access to files and Python; it limits neither time nor memory.
Here it is stopped between two of its Python calls, in the thread that runs it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import psutil
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase

from core.errors import ModelError, PromptError
from core.system.wording import reason

SECONDS = 5.0  # CPU seconds of this thread; a template takes milliseconds
CHARACTERS = 64 << 20  # of the output
MEMORY_BYTES = 1 << 30  # growth of the process meanwhile
EVERY = 8  # calls between two checks of the clock ...
LOOK_S = 0.005  # ... and CPU seconds between two checks of the memory, which cost more
ADVICE = "Download the model's tokenizer files again, or remove its chat template to chat without one."


class _Beyond(Exception):
    """A limit was exceeded; the text says which."""


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render a chat with the tokenizer's template, which must exist; `options` as in `apply_chat_template`.

    Raises ModelError, worded for the user, when the template is invalid, fails, or exceeds a limit; TemplateError with
    the template's own message when it rejects the chat.
    """
    try:
        with _within():
            text: str = tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, **options)
        if not isinstance(text, str) or len(text) > CHARACTERS:
            raise _Beyond(f"makes more than {CHARACTERS:,} characters")
    except _Beyond as error:
        raise ModelError(f"The model's chat template was stopped: it {error}. {ADVICE}") from None
    except TemplateSyntaxError as error:
        raise ModelError(
            f"The model's chat template is damaged in line {error.lineno}: {reason(error)}. {ADVICE}"
        ) from None
    except SecurityError:
        raise ModelError(f"The model's chat template asks for what no template may have. {ADVICE}") from None
    except TemplateError as error:
        if type(error) is TemplateError:  # the template called raise_exception
            raise
        raise ModelError(f"The model's chat template fails: {reason(error)}. {ADVICE}") from None
    except Exception as error:  # an untrusted program can raise anything
        raise ModelError(f"The model's chat template fails: {reason(error)}. {ADVICE}") from None
    return text


def prompt_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The prompt text of a chat, ready for an answer; `tools` = those that the model is offered. A chat that the
    template rejects because of where system messages stand is put in another form. Raises ModelError as `render` does,
    and PromptError with the template's message when it rejects the chat in every form."""
    offered: dict[str, Any] = {"tools": [dict(one) for one in tools]} if tools else {}
    rejected: TemplateError | None = None
    for form in forms(messages):
        try:
            return render(tokenizer, form, add_generation_prompt=True, **offered)
        except TemplateError as error:
            rejected = rejected or error
    assert rejected is not None
    raise PromptError(
        f"The model's chat template does not take this chat: {reason(rejected)}. Start a new chat, or "
        "change its messages."
    )


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """A chat as it is; if it has system messages also with those at its beginning in one and the others said by the
    user, and without any, what they say coming before what the user says first."""
    yield list(messages)
    systems = [one for one in messages if one["role"] == "system"]
    if not systems:
        return
    begun = list(takewhile(lambda one: one["role"] == "system", messages))
    rest = [{**one, "role": "user"} if one["role"] == "system" else one for one in messages[len(begun) :]]
    if begun and len(systems) > 1:
        yield [{**begun[0], "content": _joined(begun)}, *_turns(rest)]
    yield _turns([{**one, "role": "user"} if one["role"] == "system" else one for one in messages])


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The same with one message in place of several of the user's in a row."""
    turns: list[Mapping[str, Any]] = []
    for one in messages:
        if turns and turns[-1]["role"] == one["role"] == "user":
            turns[-1] = {**turns[-1], "content": _joined([turns[-1], one])}
        else:
            turns.append(one)
    return turns


def _joined(messages: Sequence[Mapping[str, Any]]) -> str:
    return "\n\n".join(str(one["content"]) for one in messages)


def check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError when the template cannot even render a single user message."""
    if tokenizer.chat_template is not None:
        try:
            render(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
        except TemplateError:
            pass  # it requires another first message; the error is reported when chatting


@contextmanager
def _within() -> Iterator[None]:
    """Trace this thread's function calls, and raise when it exceeds the limits of time or memory."""
    before, began, process = sys.getprofile(), time.thread_time(), psutil.Process()
    grown_from = process.memory_info().rss
    calls, looked = 0, began

    def watch(frame: object, event: str, argument: object) -> None:
        nonlocal calls, looked
        calls += 1
        if calls % EVERY:
            return
        now = time.thread_time()
        if now - began > SECONDS:
            raise _Beyond(f"did not end within {SECONDS:g} seconds")
        if now - looked > LOOK_S:
            looked = now
            if process.memory_info().rss - grown_from > MEMORY_BYTES:
                raise _Beyond(f"takes more than {MEMORY_BYTES >> 20} MiB of memory")

    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(before)
