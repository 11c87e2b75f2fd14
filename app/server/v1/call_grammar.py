"""The grammar of tool calls, for answers that have to call a tool, or else keep to a JSON schema.

Calls are written as `parts.py` reads them first: JSON with `name` and `arguments` between <tool_call> tags. The form is
Lark as llguidance reads it: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.server.v1.parts import CALL, CALLED
from core.engine.grammar import FORM

LINE = "\n"
COMPOSED = {"$ref", "allOf", "anyOf", "oneOf"}  # words that may name further properties
LENIENT = {**FORM, "lenient": True}  # tools' schemas are full of words that cannot be kept to: they are passed over


def grammar(tools: Sequence[Mapping[str, Any]], schema: str = "", *, several: bool = False) -> str:
    """A call of one of these tools (in the form of chat templates), or several; with a JSON schema either that or JSON
    of it."""
    one = " | ".join(f"tool_{number}" for number in range(len(tools)))
    rules = [
        "start: calls" + (" | answer" if schema else ""),
        "calls: call" + (f" ({_text(LINE)} call)*" if several else ""),
        f"call: {_text(CALL + LINE)} ({one}) {_text(LINE + CALLED)}",
    ]
    for number, tool in enumerate(tools):
        function = tool["function"]
        begun = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f"tool_{number}: {_text(begun)} arguments_{number} {_text('}')}")
        arguments = {"type": "object", **(function.get("parameters") or {})}
        if "properties" in arguments and not COMPOSED & arguments.keys():
            arguments.setdefault("additionalProperties", False)  # a tool has no use for arguments that it does not name
        rules.append(f"arguments_{number}: {_json(arguments, LENIENT)}")
    if schema:
        rules.append(f"answer: {_json(json.loads(schema), FORM)}")
    return "\n".join(rules) + "\n"


def _json(schema: Mapping[str, Any], form: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': form})}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
