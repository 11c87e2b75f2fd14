"""Tools that a request offers to the model, in the form that chat templates take, and those it has to call."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.server.errors import ApiError
from app.server.v1.call_grammar import grammar
from app.server.v1.fields import LONGEST, possible
from app.server.v1.parts import CALLED
from app.services.host import Host
from core.settings.sampling import Sampling

log = logging.getLogger("moestro.app")
CHOICE = "tool_choice"
FREE, ANY = ("auto", None), ("required", "any")


@dataclass(frozen=True, slots=True)
class Offer:
    """Functions in the form of chat templates: those that the prompt lists, and those of which it has to call one
    (none: it may answer as it likes)."""

    tools: tuple[dict[str, Any], ...] = ()
    forced: tuple[dict[str, Any], ...] = ()


def offered(
    host: Host,
    messages: Sequence[Mapping[str, Any]],
    where: str,
    tools: Sequence[Mapping[str, Any]] | None,
    choice: Any,
) -> Offer:
    """The functions among `tools`: those of OpenAI's chat completions and responses, and of Anthropic's messages. Tools
    that the server itself would have to run are left out, and logged. `where` = the field that the messages come from.

    Raises ApiError for a tool that is damaged, for a choice of what is not offered, and for tools, or earlier calls in
    the messages, when the model's template would leave them out."""
    if any("tool_calls" in one for one in messages):
        _require(host, where)
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind == "none":
        return Offer()
    found = tuple([one for number, tool in enumerate(tools or ()) if (one := _function(tool, f"tools.{number}"))])
    if tools and len(found) < len(tools):
        log.info("%d tools of a request are none that a model is offered here", len(tools) - len(found))
    if found:
        _require(host, "tools")
    if kind == "allowed_tools":  # OpenAI's subset of the tools
        inner = choice.get("allowed_tools", choice)
        found = _named(found, inner.get("tools") if isinstance(inner, Mapping) else None)
        kind = inner.get("mode")
    if kind in FREE:
        return Offer(found)
    if kind in ANY:
        return Offer(found, _named(found, found))
    if kind in ("function", "tool"):
        return Offer(found, _named(found, [choice]))
    raise ApiError(
        f"{CHOICE}: {str(kind)[:40]!r} cannot be honoured. There are auto, none, required, a function's name, and "
        "allowed_tools.",
        CHOICE,
    )


def _named(tools: Sequence[dict[str, Any]], wanted: Any) -> tuple[dict[str, Any], ...]:
    """Those of the tools that are named, as a tool or a choice of one names it. Raises ApiError for any other name."""
    by_name = {one["function"]["name"]: one for one in tools}
    names = [_name(one) for one in wanted] if isinstance(wanted, (list, tuple)) else []
    if not names or not all(isinstance(name, str) and name in by_name for name in names):
        raise ApiError(
            f"{CHOICE}: choose among the functions that tools offers: {', '.join(by_name) or 'none'}.", CHOICE
        )
    return tuple([by_name[name] for name in names])


def _name(choice: Any) -> Any:
    inner = choice.get("function", choice) if isinstance(choice, Mapping) else None
    return inner.get("name") if isinstance(inner, Mapping) else None


def _require(host: Host, field: str) -> None:
    loaded = host.models.loaded
    if loaded is not None and not loaded.engine.takes_tools:
        raise ApiError(f"{field}: the chat template of this model takes no tools. Leave them out.", field)


def _function(tool: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    kind = tool.get("type", "custom")
    inner = tool.get("function") if kind == "function" and "function" in tool else tool
    if not isinstance(inner, Mapping) or kind not in ("function", "custom"):
        if kind == "function":
            raise ApiError(f"{where}.function: give an object with a name.", f"{where}.function")
        return None
    parameters = inner.get("parameters", inner.get("input_schema"))
    if kind == "custom" and not isinstance(parameters, Mapping):
        return None  # its input is free text, which no template has
    if parameters is not None and not isinstance(parameters, Mapping):
        raise ApiError(f"{where}: the parameters of a tool are a JSON schema.", where)
    if not isinstance(name := inner.get("name"), str) or not name:
        raise ApiError(f"{where}: a tool has a name.", f"{where}.name")
    function: dict[str, Any] = {"name": name, "description": str(inner.get("description") or "")}
    return {
        "type": "function",
        "function": {**function, "parameters": parameters or {"type": "object", "properties": {}}},
    }


def with_tools(sampling: Sampling, offer: Offer, limit: int | None, parallel: bool | None) -> Sampling:
    """The same, in which a tool is called where one has to be, and otherwise where one may be and the answer is to keep
    to a JSON schema. `limit` = tokens that the request allows; where it leaves that out, calls and JSON are not cut.
    `parallel`: whether several calls are wanted; None: as the model likes, and one where a grammar has it call. Raises
    ApiError for tools whose schemas cannot be kept to."""
    if limit is None and (offer.tools or sampling.schema):
        sampling = replace(sampling, max_new_tokens=LONGEST)
    if offer.forced:
        called = grammar(offer.forced, several=bool(parallel))
        sampling = possible(replace(sampling, schema="", grammar=called), "tools")
    elif offer.tools and sampling.schema:
        called = grammar(offer.tools, sampling.schema, several=bool(parallel))
        sampling = possible(replace(sampling, schema="", grammar=called), "tools")
    return replace(sampling, stop=(*sampling.stop, CALLED)) if parallel is False and offer.tools else sampling
