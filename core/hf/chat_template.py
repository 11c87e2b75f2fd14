"""Runs a model's chat template, an untrusted program, in the process of `core.system.template_worker`. Nothing of a
template is compiled or rendered in this one.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any

from transformers import PreTrainedTokenizerBase

from core.errors import ModelError, PromptError
from core.system.limited_process import NotStarted, Stopped
from core.system.template_worker import RENDERER, encode
from core.system.wording import MOST, one_line, reason

ADVICE = "Download the model's tokenizer files again, or remove its chat template to chat without one."
UNKEPT = "The model's chat template does not keep the beginning of an answer, so this one cannot be continued."
WORDS = {"damaged": "is damaged {}", "forbidden": "asks for what no template may have", "failed": "fails: {}"}


class Rejected(Exception):
    """The template does not take the chat, for the reason that it gives itself."""


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    """Render a chat with the tokenizer's template, which must exist; `options` as in `apply_chat_template`.

    Raises PromptError, worded for the user, when the template is invalid, fails, or exceeds a limit (with the same chat
    it would again), and for a chat that is empty or has values that are not those of JSON; Rejected with the template's
    own message when it rejects the chat; ModelError when there is no process to render it.
    """
    if not messages:
        raise PromptError("The chat is empty. Write something to answer.")
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    try:
        template = tokenizer.get_chat_template(None, options.get("tools"))
    except ValueError as error:  # it has several, and none for this
        raise PromptError(f"The model's chat template fails: {reason(error)}. {ADVICE}") from None
    try:
        request = encode([dict(one) for one in messages], chat_template=template, **{**special, **options})
    except (TypeError, ValueError, RecursionError) as error:
        raise PromptError(
            f"The chat cannot be given to the model's chat template: {error}. Use texts, numbers, lists and mappings."
        ) from None
    try:
        return _text(RENDERER.ask(request))
    except Stopped as error:
        raise PromptError(f"The model's chat template was stopped: it {error}. {ADVICE}") from None
    except NotStarted as error:
        raise ModelError(
            f"The process for the model's chat template cannot be started: {error}. Close other programs and try again."
        ) from error


def _text(reply: bytes) -> str:
    """The rendered chat. Raises Rejected, PromptError, or Stopped for a reply that the worker does not give."""
    kind, _, payload = reply.partition(b"\n")
    if kind == b"text":
        try:
            return payload.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:
            raise Stopped("broke the process that ran it") from None
    if kind == b"rejected":
        raise Rejected(one_line(payload.decode("utf-8", "replace")))
    why = payload[: 4 * MOST].decode("utf-8", "replace")
    words = WORDS.get(kind[:MOST].decode("utf-8", "replace"))
    if words is None:
        raise Stopped("broke the process that ran it")
    raise PromptError(f"The model's chat template {words.format(why)}. {ADVICE}")


def prompt_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    begun: str = "",
) -> str:
    """The prompt text of a chat, ready for an answer, or ending with one that has `begun`; `tools` = those that the
    model is offered. A chat that the template rejects because of where system messages stand is put in another form.
    Raises as `render` does, and PromptError with the template's message when it rejects the chat in every form, or
    does not keep what has begun."""
    offered: dict[str, Any] = {"tools": [dict(one) for one in tools]} if tools else {}
    if begun:
        messages = [*messages, {"role": "assistant", "content": begun}]
    ending = "continue_final_message" if begun else "add_generation_prompt"
    rejected: Rejected | None = None
    for form in forms(messages):
        try:
            text = render(tokenizer, form, **{ending: True}, **offered)
            ended = begun.rstrip()  # templates trim messages
            return text + begun[len(ended) :] if begun and text.endswith(ended) else text
        except Rejected as error:
            rejected = rejected or error
        except PromptError as error:
            if begun and "continue_final_message" in str(error):  # as transformers says it
                raise PromptError(UNKEPT) from None
            raise
    assert rejected is not None
    raise PromptError(
        f"The model's chat template does not take this chat: {rejected}. Start a new chat, or change its messages."
    )


def forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """A chat as it is; if it has system messages also with those at its beginning in one and the others as the
    user's, and without any, their text coming before the user's first."""
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
        except Rejected:
            pass  # it requires another first message; the error is reported when chatting
