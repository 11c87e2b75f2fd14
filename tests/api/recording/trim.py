"""Takes out of a recorded request what is not its form: long texts, secrets, and whatever is of one machine or run.

A text of others (system prompts, descriptions of tools) becomes a note of how long it was; names, types, structure and
numbers stay. So does what the recorder itself asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KEPT_CHARS = 60  # a text up to this length stays as it is, unless it describes something
TEXTS = ("description", "instructions", "definition")  # fields that hold prose, however short
HEADERS = ("accept", "content-type", "user-agent", "origin", "referer", "anthropic-version", "anthropic-beta")
SECRETS = {"authorization": "Bearer KEY", "x-api-key": "KEY"}
UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
HEX = re.compile(r"\b(?=\w*\d)[0-9a-fA-F]{16,}\b")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d(?:T[0-9:.]+(?:Z|[+-]\d\d:?\d\d)?)?")
SYSTEM = re.compile(r"\([^()]*(?:x86|x64|amd64|arm64|aarch64)[^()]*\)", re.IGNORECASE)
UNNAMED = "00000000-0000-4000-8000-000000000000"


class Trimmer:
    """`named` = texts of this machine (folders, names) -> what stands for them; `own` = texts that stay."""

    def __init__(self, named: Mapping[str, str], own: tuple[str, ...]) -> None:
        self._named = sorted(named.items(), key=lambda one: -len(one[0]))
        self._own = own

    def request(self, seen: Mapping[str, Any]) -> dict[str, Any]:
        """A request as it is kept."""
        headers = {
            name: SECRETS.get(name, value if name.startswith("anthropic-") else self.neutral(value))
            for name, value in sorted(seen["headers"].items())
            if name in HEADERS or name in SECRETS
        }
        if "user-agent" in headers:
            headers["user-agent"] = SYSTEM.sub("(system)", headers["user-agent"])
        return {
            "method": seen["method"],
            "path": self.neutral(seen["path"]),
            "headers": headers,
            "body": self.value(seen["body"]),
        }

    def value(self, value: Any, name: str = "") -> Any:
        """A value of a body; `name` = the field that it is in."""
        if isinstance(value, dict):
            named = name == "properties"  # its keys are names of parameters
            return {self.neutral(key): self.value(one, "" if named else key) for key, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, name) for one in value]
        return self.text(value, name) if isinstance(value, str) else value

    def text(self, text: str, name: str) -> str:
        """A text, or how long it was."""
        if text in self._own:
            return text
        if name in TEXTS or len(text) > KEPT_CHARS:
            return f"[{len(text)} characters]"
        return self.neutral(text)

    def neutral(self, text: str) -> str:
        """The same without names of this machine and marks of this run."""
        for found, put in self._named:
            text = text.replace(found, put)
        return DATE.sub("2026-01-01", HEX.sub("0" * 16, UUID.sub(UNNAMED, text)))
