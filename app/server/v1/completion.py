"""OpenAI's completions: a text is continued, without a chat template."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from pydantic import Field

from app.server.errors import ApiError
from app.server.v1.chat import DONE, OpenAIBody, OpenAIForm
from app.server.v1.fields import REFUSED, with_schema
from app.server.v1.parts import Part
from app.server.v1.reply import Reply, data
from app.server.v1.result import Result
from app.services.host import Host
from core.settings.sampling import Sampling
from core.types import TokenLogprob

MOST_LOGPROBS = 5


class CompletionBody(OpenAIBody):
    """A request for the continuation of a text."""

    refused: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = {
        **REFUSED,
        "echo": ("the prompt is not repeated", ()),
        "suffix": ("a text is continued, not filled in; put the model's own fill-in tokens into the prompt", ()),
    }
    prompt: Any = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)

    def text(self) -> str:
        """The prompt, which may stand in a list of one. Raises ApiError."""
        prompt = self.prompt[0] if isinstance(self.prompt, list) and len(self.prompt) == 1 else self.prompt
        if isinstance(prompt, str):
            return prompt
        raise ApiError("prompt: give one text; several prompts, and token ids, are not taken.", "prompt")

    def sampling(self, base: Sampling) -> Sampling:
        """As `sampled`. Raises ApiError."""
        drawn = self.sampled(base, "max_tokens", self.max_tokens)
        return replace(with_schema(drawn, "response_format", self.response_format), logprobs=self.logprobs)


def reply(host: Host, body: CompletionBody) -> Reply:
    """The answer to a request. Raises MoestroError."""
    body.take(host)
    sampling = body.sampling(host.chats.sampling)
    answer = host.chats.complete(body.text(), sampling)
    form = CompletionForm(host.models.model_id, sampling.logprobs is not None, body.usage)
    return Reply(host, answer, form, None, bool(body.stream))


class CompletionForm(OpenAIForm):
    """A completion, whole or in chunks."""

    def __init__(self, model: str | None, logprobs: bool, usage: bool) -> None:
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._logprobs, self._usage, self._offset = logprobs, usage, 0

    def opening(self) -> Iterable[str]:
        return ()

    def part(self, part: Part, logprobs: Sequence[TokenLogprob]) -> Iterable[str]:
        yield data({**self._chunk(), "choices": [self._choice(part.text, None, logprobs)]})

    def closing(self, result: Result) -> Iterable[str]:
        more = {"seed": result.seed, "moestro": result.facts}
        yield data({**self._chunk(), **more, "choices": [self._choice("", result.finish, ())]})
        if self._usage:
            yield data({**self._chunk(), "choices": [], "usage": result.usage.openai()})
        yield DONE

    def whole(self, result: Result) -> dict[str, Any]:
        return {
            **self._head,
            "seed": result.seed,
            "usage": result.usage.openai(),
            "choices": [self._choice(result.content, result.finish, result.logprobs)],
            "moestro": result.facts,
        }

    def _chunk(self) -> dict[str, Any]:
        return {**self._head, **({"usage": None} if self._usage else {})}

    def _choice(self, text: str, finish: str | None, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        found = self._tokens(logprobs) if self._logprobs and logprobs else None
        return {"index": 0, "text": text, "logprobs": found, "finish_reason": finish}

    def _tokens(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        offsets = []
        for one in logprobs:
            offsets.append(self._offset)
            self._offset += len(one.text)
        return {
            "tokens": [one.text for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [dict(one.top) for one in logprobs],
            "text_offset": offsets,
        }
