"""Turns a chat or a text into token ids; for a text-to-text model the last message into those of its encoder, and the
decoder's start token."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerBase

from core.engine.length import TextLimit
from core.errors import ContextError, ModelError, PromptError
from core.hf import chat_template
from core.hf.text_to_text import start_token
from core.types import Asked, Begun, Chat, Ids

PROBE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "probe_of_tools", "description": "", "parameters": {}},
}
NO_SEQUEL = "This model writes one text for another, and cannot go on with an answer. Regenerate it."
THINK = "<think>"  # begins the reasoning of models that write theirs into the answer
QUICK_CHARS = 50_000  # a text up to this length is tokenised whatever the context: that is fast, and the count is exact


class Prompt:
    """The model's tokenizer, chat template and end-of-sequence tokens."""

    _trial: Future[None]  # of the chat template

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, generation_config: Any, *, text_to_text: bool = False
    ) -> None:
        self.tokenizer = tokenizer
        self.start = start_token(generation_config) if text_to_text else None
        """What stands between a prompt and its answer in a text-to-text model, which is asked nothing but a text."""
        ends = [tokenizer.eos_token_id, generation_config.eos_token_id]
        self.ends = {i for end in ends for i in (end if isinstance(end, list) else [end]) if isinstance(i, int)}

    @cached_property
    def limit(self) -> TextLimit:
        """The most text that a number of tokens can hold."""
        return TextLimit.of(self.tokenizer)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template writes tools into the prompt."""
        return PROBE["function"]["name"] in self._rendered((PROBE,))

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the chat template begins the reasoning, so that an answer starts in the middle of it."""
        return self._rendered(()).rstrip().endswith(THINK)

    def begin_trial(self) -> None:
        """Try the chat template in another thread, and render what the two properties above say, so that they need no
        rendering later."""
        thread = ThreadPoolExecutor(1, "moestro-template")
        self._trial = thread.submit(self._try)
        thread.shutdown(wait=False)

    def require_trial(self, *, wait: bool = True) -> None:
        """Raises ModelError when the trial found that the template cannot even render a single user message; without
        `wait`, only if the trial has ended."""
        if wait or self._trial.done():
            self._trial.result()

    def _try(self) -> None:
        if self.start is None:
            chat_template.check(self.tokenizer)
            _ = self.takes_tools, self.opens_reasoning

    def _rendered(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """A chat of one message through the template; "" when that fails."""
        try:
            return self.text(Chat([{"role": "user", "content": "Hello"}], tools))
        except ModelError:
            return ""

    def text(self, messages: Sequence[Mapping[str, Any]] | str | Chat, begun: str = "") -> str:
        """The text to tokenise: a chat through the model's template, plain text unchanged; then what an answer has
        `begun` with. Raises ModelError when the template fails, PromptError when it cannot be continued."""
        if isinstance(messages, str):
            return messages + begun
        chat = messages if isinstance(messages, Chat) else Chat(messages)
        if self.start is not None:  # it knows no turns
            if begun:
                raise PromptError(NO_SEQUEL)
            return str(next((m["content"] for m in reversed(chat.messages) if m["role"] == "user"), ""))
        if self.tokenizer.chat_template is None:
            return "\n\n".join([*(m["content"] for m in chat.messages), *([begun] if begun else [])])
        return chat_template.prompt_of(self.tokenizer, chat.messages, chat.tools, begun)

    def tokens(self, messages: Asked, context: int | None = None) -> list[int]:
        """Token ids of a chat or of a plain text. Raises ContextError, before tokenising, for a text that `context`
        tokens could never hold."""
        after = [] if self.start is None else [self.start]
        if isinstance(messages, Ids):
            return [*messages.ids, *after]
        asked, begun = (messages.asked, messages.text) if isinstance(messages, Begun) else (messages, "")
        if isinstance(messages, Begun) and self._wrote(messages):
            return [*self.tokens(asked, context), *messages.ids]
        text = self.text(asked, begun)
        if context is not None:
            self._check(text, context)
        whole = isinstance(asked, str) or self.start is not None  # a chat template writes special tokens itself
        ids: list[int] = self.tokenizer(text, add_special_tokens=whole, verbose=False).input_ids  # encode refuses
        return [*ids, *after] if ids else []

    def _wrote(self, begun: Begun) -> bool:
        """Whether the tokens of an answer have its text; with another model's tokenizer they have another."""
        if self.start is not None or not begun.ids or not 0 <= min(begun.ids) <= max(begun.ids) < len(self.tokenizer):
            return False
        decoder = DecodeStream(skip_special_tokens=True)
        return "".join(decoder.step(self.tokenizer._tokenizer, one) or "" for one in begun.ids) == begun.text

    def begun(self, messages: Asked, ids: Sequence[int]) -> int:
        """How many of the last tokens of a prompt are the answer's own, which it continues."""
        if not isinstance(messages, Begun):
            return 0
        if self._wrote(messages):
            return len(messages.ids)
        before = self.tokens(messages.asked)
        shared = next((at for at, (one, other) in enumerate(zip(before, ids, strict=False)) if one != other), None)
        return len(ids) - (min(len(before), len(ids)) if shared is None else shared)

    def check(self, messages: Sequence[Mapping[str, Any]] | str | Chat | Begun, context: int) -> None:
        """Raises ContextError when the number of characters alone shows that the text is too long. Takes almost no time
        otherwise."""
        asked, begun = (messages.asked, messages.text) if isinstance(messages, Begun) else (messages, "")
        said = asked.messages if isinstance(asked, Chat) else asked
        parts = [said] if isinstance(said, str) else [m["content"] for m in said]
        if sum(map(len, parts)) + len(begun) > QUICK_CHARS:
            self._check(self.text(asked, begun), context)

    def _check(self, text: str, context: int) -> None:
        if len(text) > QUICK_CHARS:
            self.limit.check(text, context)

    def encode(self, messages: Asked, context: int) -> list[int]:
        """Token ids with room for at least one more. Raises ContextError for an empty or too long prompt."""
        ids = self.tokens(messages, context)
        if not ids:
            raise ContextError("The message is empty. Write something to answer.")
        if len(ids) >= context:
            raise ContextError(
                f"The chat has {len(ids)} tokens, but the context holds {context}. Start a new chat, "
                "shorten the message, or load the model with a longer context."
            )
        return ids
