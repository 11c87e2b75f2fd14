"""Tools that a request offers to the model, in the form that chat templates take."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.server.errors import ApiError
from app.server.v1.parts import CALLED
from app.services.host import Host
from core.settings.sampling import Sampling

log = logging.getLogger("moestro.app")
FREE = ("auto", "none", None)  # choices of a tool that leave it to the model, or take it away


def offered(
    host: Host, tools: Sequence[Mapping[str, Any]] | None, choice: Any, field: str = "tools"
) -> tuple[dict[str, Any], ...]:
    """The functions among `tools` as templates take them: those of OpenAI's chat completions and responses, and of
    Anthropic's messages. Tools that the server itself would have to run are left out, and logged.

    Raises ApiError for a tool that is damaged, for a model whose template takes none, and for a choice that would force
    the model.
    """
    kind = choice.get("type") if isinstance(choice, Mapping) else choice
    if kind not in FREE:
        raise ApiError(
            f"tool_choice: the model cannot be made to call a tool, so {str(kind)[:40]!r} cannot be honoured. "
            "There are 'auto' and 'none'.",
            "tool_choice",
        )
    if not tools or kind == "none":
        return ()
    found = tuple([one for number, tool in enumerate(tools) if (one := _function(tool, f"{field}.{number}"))])
    if len(found) < len(tools):
        log.info("%d tools of a request are none that a model is offered here", len(tools) - len(found))
    if found:
        _require(host, field)
    return found


def require_known(host: Host, messages: Sequence[Mapping[str, Any]], field: str) -> None:
    """Raises ApiError for tool calls in messages when the model's template would leave them out."""
    if any("tool_calls" in one for one in messages):
        _require(host, field)


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


def one_call(sampling: Sampling) -> Sampling:
    """The same, ending with the first tool call."""
    return replace(sampling, stop=(*sampling.stop, CALLED))
