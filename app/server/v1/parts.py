"""The parts of an answer's text: reasoning (between <think> tags), content, and tool calls.

Tool calls are read in the forms of the ChatML family of templates: JSON with `name` and `arguments`, or <function=...>
with <parameter=...>, each between <tool_call> tags. What cannot be read is content."""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from core.engine.stop_text import begun

Kind = Literal["reasoning", "content", "call"]
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)(?:</function>\s*)?", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that the model calls; `arguments` = JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True, slots=True)
class Part:
    """The next piece of an answer: text of a kind, or a whole call."""

    kind: Kind
    text: str = ""
    call: Call | None = None


class Parts:
    """Fed an answer's text piece by piece. `opened`: the prompt began the reasoning. `tools` = those offered, by name;
    without any, calls are not looked for."""

    def __init__(self, *, opened: bool = False, tools: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        self._state: Literal["start", "reasoning", "content", "call"] = "reasoning" if opened else "start"
        self._tools, self._held = tools or {}, ""
        self._trims = opened  # line breaks that separate the next part from a tag are no part of it

    def feed(self, text: str) -> list[Part]:
        """The next text -> what is certain of it; tags that are not complete are withheld."""
        self._held += text
        return list(self._cut(last=False))

    def end(self) -> list[Part]:
        """What is still withheld."""
        return list(self._cut(last=True))

    def _cut(self, last: bool) -> Iterator[Part]:
        while self._held:
            if self._state == "start" and not self._begin(last):
                return
            if self._trims:
                self._held = self._held.lstrip("\n")
                if not self._held:
                    return
                self._trims = False
            mark = {"reasoning": THOUGHT, "call": CALLED}.get(self._state, CALL if self._tools else "")
            at = self._held.find(mark) if mark else -1
            if at >= 0:
                before, self._held = self._held[:at], self._held[at + len(mark) :]
                yield from self._part(before, ended=True)
                self._next()
                continue
            if self._state == "call" and not last:
                return
            keep = begun(self._held, mark) if mark and not last else 0
            before, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            yield from self._part(before, ended=False)
            return

    def _begin(self, last: bool) -> bool:
        """Whether it is known how the answer begins."""
        lead = self._held.lstrip()
        if lead.startswith(THINK):
            self._state, self._held, self._trims = "reasoning", lead[len(THINK) :].lstrip("\n"), True
            return bool(self._held)
        if THINK.startswith(lead) and not last:
            return False
        self._state = "content"
        return True

    def _next(self) -> None:
        self._trims = self._state != "content"
        self._state = "call" if self._state == "content" else "content"

    def _part(self, text: str, ended: bool) -> Iterator[Part]:
        if self._state == "call":
            call = read_call(text, self._tools)
            yield Part("call", call=call) if call else Part("content", CALL + text + CALLED * ended)
        elif text:
            yield Part("reasoning" if self._state == "reasoning" else "content", text)


def read_call(text: str, tools: Mapping[str, Mapping[str, Any]]) -> Call | None:
    """A tool call as the model wrote it, without its tags; None for what is none. `tools` = the parameters' schema of
    each."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return _read_tags(text, tools)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    return Call(found["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def _read_tags(text: str, tools: Mapping[str, Mapping[str, Any]]) -> Call | None:
    found = FUNCTION.fullmatch(text)
    if found is None:
        return None
    known = tools.get(found[1], {}).get("properties", {})
    known = known if isinstance(known, dict) else {}
    values = {name: _value(value, known.get(name)) for name, value in PARAMETER.findall(found[2])}
    return Call(found[1], json.dumps(values, ensure_ascii=False))


def _value(text: str, schema: Any) -> Any:
    """The value of a parameter: JSON, unless its schema says that it is a text."""
    if not isinstance(schema, dict) or schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters' schema of each tool (in the form of chat templates), by name."""
    return {one["function"]["name"]: one["function"].get("parameters") or {} for one in tools}
