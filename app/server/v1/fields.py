"""Fields that requests of all APIs share, and what becomes of the others: one that would change the answer and cannot
be honoured is refused by name, any other is logged and ignored."""

import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from app.server.errors import ApiError
from app.services.host import Host
from app.wording import model_id, short_name
from core.engine.grammar import require
from core.errors import PromptError, SettingError
from core.settings.param import declared
from core.settings.sampling import Sampling

log = logging.getLogger("moestro.app")
WARNED_MAX = 256  # sets of ignored fields that are remembered as logged
LOGGED = 30  # names of ignored fields in one line of the log
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")  # what looks like the name of a field, and not like a user's text
MOST_STOPS, MOST_STOP_CHARS = 64, 1000
NOTHING: tuple[Any, ...] = (None, False, "", [], {})  # values that ask for nothing
ONE = "one answer a request is written"
CONSTRAINED = "answers keep to a form only as response_format with a JSON schema says"
LONGEST = int(declared(Sampling)["max_new_tokens"].high or 0)  # tokens, more than any context holds
REFUSED: Mapping[str, tuple[str, Sequence[Any]]] = {
    "n": (ONE, (1,)),
    "best_of": (ONE, (1,)),
    "logit_bias": ("single tokens cannot be made likelier", ()),
    "guided_json": (CONSTRAINED, ()),
    "guided_regex": (CONSTRAINED, ()),
    "guided_choice": (CONSTRAINED, ()),
    "guided_grammar": (CONSTRAINED, ()),
    "structured_outputs": (CONSTRAINED, ()),
    "grammar": (CONSTRAINED, ()),
    "json_schema": (CONSTRAINED, ()),
    "modalities": ("answers are text", (["text"],)),
    "audio": ("answers are text", ()),
    "functions": ("this form is no longer in use; send tools", ()),
    "function_call": ("this form is no longer in use; send tools", ("none", "auto")),
    "web_search_options": ("this server does not search the web", ()),
    "chat_template_kwargs": ("the chat template is used as the model has it", ()),
    "min_tokens": ("an answer ends where the model ends it", (0,)),
    "ignore_eos": ("an answer ends where the model ends it", ()),
    "use_beam_search": ("tokens are drawn one at a time", ()),
    "prompt_logprobs": ("log probabilities are those of the answer's tokens", ()),
}
"""Fields of the OpenAI API and of servers like it: why they cannot be honoured, and with which values they need not."""


class Body(BaseModel):
    """A request of any API."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    refused: ClassVar[Mapping[str, tuple[str, Sequence[Any]]]] = REFUSED

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)  # -1, as some clients send it, is no limit

    def take(self, host: Host) -> None:
        """Look at the model and at fields that have no meaning here. Raises ApiError for a model that is not the loaded
        one, and for a field that cannot be honoured."""
        require_model(host, self.model)
        self.check()

    def check(self) -> None:
        """Look at fields that have no meaning here. Raises ApiError for one that cannot be honoured."""
        extra = self.model_extra or {}
        for name, value in extra.items():
            if name in self.refused:
                why, harmless = self.refused[name]
                if not any(_same(value, one) for one in (*NOTHING, *harmless)):
                    raise ApiError(f"{name} cannot be honoured: {why}. Leave it out.", name)
        unknown = [name for name in extra if name not in self.refused]
        if unknown:
            named = sorted(name for name in unknown if NAME.fullmatch(name))[:LOGGED]
            say_once(", ".join(named) or f"{len(unknown)}")

    def drawn(self, base: Sampling, given: Mapping[str, tuple[str, Any]]) -> Sampling:
        """The sampling settings `base` with those that the request gives: setting -> (its field, the value or None).
        Raises ApiError."""
        own = {name: (name, getattr(self, name)) for name in ("temperature", "top_p")}
        own["top_k"] = ("top_k", None if self.top_k is None else max(0, self.top_k))
        values = dict(base.settings)
        for name, (field, value) in {**own, **given}.items():
            if value is None:
                continue
            try:
                values[name] = declared(Sampling)[name].check(value)
            except SettingError as error:
                raise ApiError(str(error).replace(name, field), field) from None
        return Sampling.checked(**values)


@lru_cache(WARNED_MAX)
def say_once(names: str) -> None:
    """Log fields without effect, where they can be seen; a client sends the same ones with every request."""
    log.warning("requests have fields without effect (logged once): %s", names)


def longest(field: str, tokens: int | None) -> tuple[str, int | None]:
    """How long an answer may become: a limit beyond what any context holds is none."""
    return field, None if tokens is None else min(tokens, LONGEST)


def with_stop(sampling: Sampling, field: str, stop: Any) -> Sampling:
    """The same, ending before the first of these texts: a text or a list of texts. Raises ApiError."""
    texts = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(texts, list) or not all(isinstance(one, str) for one in texts):
        raise ApiError(f"{field}: give a text, or a list of texts.", field)
    if len(texts) > MOST_STOPS or any(len(one) > MOST_STOP_CHARS for one in texts):
        raise ApiError(f"{field}: at most {MOST_STOPS} texts of {MOST_STOP_CHARS} characters each.", field)
    return replace(sampling, stop=tuple(one for one in texts if one))


def with_schema(sampling: Sampling, field: str, form: Any) -> Sampling:
    """The same, keeping to the JSON schema of a response format: those of chat completions, and those of responses and
    messages, which are flatter. Raises ApiError."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if form is None or kind == "text":
        return sampling
    inner = form.get("json_schema", form) if kind == "json_schema" else {"schema": {"type": "object"}}
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if kind not in ("json_schema", "json_object") or not isinstance(schema, Mapping):
        raise ApiError(
            f"{field} cannot be honoured: there are the types text, json_object, and json_schema with a schema.", field
        )
    return possible(replace(sampling, schema=json.dumps(schema)), field)


def possible(sampling: Sampling, field: str) -> Sampling:
    """The same, if an answer can keep to its schema or grammar, which `field` asks for. Raises ApiError."""
    try:
        require(sampling)
    except PromptError as error:
        raise ApiError(f"{field}: {error}", field) from None
    return sampling


def names(host: Host) -> list[str]:
    """The names of the loaded model in requests: its id, its name, and the last part of that where it is one of the
    Hugging Face hub."""
    model = host.models.model
    if model is None:
        return []
    short = short_name(model)
    return list(dict.fromkeys([model_id(model), short, short.rpartition("/")[2]]))


def require_model(host: Host, name: str | None) -> None:
    """Raises ApiError when a request names another model than the loaded one. Its path is a name as well, and no
    error contains it."""
    known = names(host)
    if name is None or not known or name in (*known, host.models.model):
        return
    raise ApiError(
        f"The model {name[:80]!r} is not loaded here. The loaded one is {' or '.join(map(repr, known))}.",
        "model",
        "model_not_found",
        404,
    )


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and bool(value == other)
