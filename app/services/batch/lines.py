"""The prompts of a batch: a line of JSON each, in OpenAI's form for batches or a plain one."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from core.errors import MoestroError
from core.system.reading import open_regular, reason

Kind = Literal["chat", "text"]
KINDS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "text"}
LONGEST = 32 << 20  # bytes of a line
FORMS = (
    'Give {"custom_id": ..., "url": "/v1/chat/completions", "body": {...}}, {"messages": [...]} or {"prompt": "..."}, '
    'the last two with an "id" if you like.'
)


class BadLine(MoestroError):
    """A line that holds no prompt."""


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt: the request's `body` as the API of its `kind` takes it. `plain`: its answer is wanted in the plain
    form. `problem`: why there is no prompt; then `body` is empty."""

    number: int  # from 1
    id: str
    kind: Kind = "chat"
    body: Mapping[str, Any] = field(default_factory=dict)
    plain: bool = False
    problem: str = ""


def read(file: Path) -> Iterator[Line]:
    """The lines of a file that are not empty. One that holds no prompt, or has the id of an earlier one, has a
    `problem`, and the id "line-N". Raises MoestroError when it is no regular file, or cannot be read."""
    seen: dict[str, int] = {}
    try:
        with open_regular(file, MoestroError) as lines:
            for number, raw in enumerate(iter(lambda: lines.readline(LONGEST + 1), b""), 1):
                if len(raw) > LONGEST:
                    raise MoestroError(f"Line {number} of {file} is longer than {LONGEST >> 20} MB. Divide it.")
                if raw.strip():
                    yield _line(number, raw, seen)
    except OSError as error:
        raise MoestroError(f"{file} cannot be read: {reason(error)}.") from error


def _line(number: int, raw: bytes, seen: dict[str, int]) -> Line:
    try:
        line = _parsed(number, raw)
        if line.id in seen:
            raise BadLine(f"The id {line.id!r} was used in line {seen[line.id]} already. Give each line its own.")
    except BadLine as error:
        return Line(number, f"line-{number}", plain=b'"custom_id"' not in raw, problem=f"Line {number}: {error}")
    seen[line.id] = number
    return line


def _parsed(number: int, raw: bytes) -> Line:
    try:
        found = json.loads(raw)
        json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadLine("It contains an unpaired surrogate, which is not a character.") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"It is not JSON: {error}.") from None
    if not isinstance(found, dict):
        raise BadLine(f"It is not a JSON object. {FORMS}")
    if "body" in found or "custom_id" in found:
        return _openai(number, found)
    body = {key: value for key, value in found.items() if key != "id"}
    if "messages" not in found and "prompt" in found:
        if not isinstance(body["prompt"], str):
            raise BadLine("Its prompt is not a text.")
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    if "messages" in body:
        return Line(number, _id(found.get("id", f"line-{number}")), "chat", body, plain=True)
    raise BadLine(f"It has no prompt. {FORMS}")


def _openai(number: int, found: Mapping[str, Any]) -> Line:
    body, url = found.get("body"), found.get("url", "/v1/chat/completions")
    if not isinstance(body, dict):
        raise BadLine("Its body is not a JSON object.")
    if found.get("method", "POST") != "POST" or url not in KINDS:
        raise BadLine(
            f"It asks for {found.get('method', 'POST')} {url}. Only POST to {' and '.join(KINDS)} is answered."
        )
    return Line(number, _id(found.get("custom_id")), KINDS[url], body)


def _id(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise BadLine(f"Its id is {value!r:.60}, not a text or a number.")
    return str(value)
