"""A model's chat template, run within limits: it is a program that came with the model, and it may never end.

jinja's sandbox, in which transformers runs it, keeps it from files and from Python; it limits neither time nor memory.
Here it is stopped between two calls of Python that it makes, in the thread that runs it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError
from transformers import PreTrainedTokenizerBase

from core.errors import ModelError
from core.system.wording import reason

SECONDS = 5.0  # of this thread's own computing; a template takes milliseconds
CHARACTERS = 64 << 20  # of what it makes
MEMORY_BYTES = 1 << 30  # by which the process may grow meanwhile
EVERY = 8  # calls between two looks at the clock ...
LOOK_S = 0.005  # ... and time computed between two looks at the memory, which cost more
ADVICE = "Download the model's tokenizer files again, or remove its chat template to chat without one."


class _Beyond(Exception):
    """A limit was passed; the text says which."""


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], **options: Any) -> str:
    """The text of a chat by the tokenizer's template, which it has; `options` as `apply_chat_template` takes them.

    Raises ModelError, in the user's words, when the template is no template, fails, or passes a limit; TemplateError
    with the template's own words when it says itself that it does not take such a chat.
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
        if type(error) is TemplateError:  # raise_exception of the template's own
            raise
        raise ModelError(f"The model's chat template fails: {reason(error)}. {ADVICE}") from None
    except Exception as error:  # a program of anybody's
        raise ModelError(f"The model's chat template fails: {reason(error)}. {ADVICE}") from None
    return text


def prompt_of(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a chat that is to be answered. Raises ModelError as `render` does, and with the template's words when
    it does not take this chat."""
    try:
        return render(tokenizer, messages, add_generation_prompt=True)
    except TemplateError as error:
        raise ModelError(
            f"The model's chat template does not take this chat: {reason(error)}. Start a new chat, or "
            "change its messages."
        ) from None


def check(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ModelError when the template cannot even write one message of a user's."""
    if tokenizer.chat_template is not None:
        try:
            render(tokenizer, [{"role": "user", "content": "Hello"}], add_generation_prompt=True)
        except TemplateError:
            pass  # it wants another beginning, and says so to whoever chats


@contextmanager
def _within() -> Iterator[None]:
    """Count what this thread does by calls of functions, and stop it when it takes too long or too much memory."""
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
