"""A page of the dashboard without a browser: it holds the components' values and fires their events as
a browser does."""

import http.client
import json
import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

PATIENCE_S = 120.0  # for a request; longer is a hang
Value = Any


class Failed(Exception):
    """The server answered with an internal error, or not at all."""


class Http:
    """One client's connection. Raises Failed for 5xx, a broken connection and a hang."""

    def __init__(self, url: str) -> None:
        self.host, self.port = urlsplit(url).hostname or "", urlsplit(url).port or 80

    def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        """GET, or POST of JSON; returns status and content."""
        connection = self.send(path, body)
        try:
            reply = connection.getresponse()
            content = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise Failed(f"{path}: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        if reply.status >= 500:
            raise Failed(f"{path}: {reply.status} {content[:300].decode(errors='replace')}")
        return reply.status, content

    def send(self, path: str, body: object = None) -> http.client.HTTPConnection:
        """Sends the request only; the caller reads, or disconnects."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=PATIENCE_S)
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        except OSError as error:
            raise Failed(f"{path}: {type(error).__name__} {error}") from error
        return connection

    def json(self, path: str) -> dict[str, Any]:
        """The JSON answer of a GET."""
        return dict(json.loads(self.ask(path)[1]))


class Page:
    """The dashboard as one open tab."""

    def __init__(self, http: Http, random: random.Random) -> None:
        self._http = http
        config = http.json("/config")
        self._api = f"{config['api_prefix']}/run/predict"
        self._session = f"{random.getrandbits(48):012x}"
        self._values: dict[int, Value] = {one["id"]: _shown(one) for one in config["components"]}
        self._ids: dict[str, int] = {
            name: one["id"] for one in config["components"] if (name := one["props"].get("elem_id"))
        }
        self._events = {
            (of, event): one for one in config["dependencies"] for of, event in one["targets"] if one["backend_fn"]
        }

    def has(self, element: str, event: str) -> bool:
        """Whether there is such a component with such an event."""
        return (self._ids.get(element), event) in self._events

    def value(self, element: str) -> Value:
        """The value of a component."""
        return self._values[self._ids[element]]

    def set(self, element: str, value: Value) -> None:
        """Sets a value as a user does by typing or choosing; sends nothing to the server."""
        self._values[self._ids[element]] = value

    def turn(self, element: str, value: Value) -> None:
        """Moves a control."""
        self.set(element, value)
        self.fire(element, "input" if self.has(element, "input") else "submit")

    def fire(self, element: str, event: str, data: Mapping[str, Value] | None = None) -> None:
        """Fires an event, and applies its results."""
        of = self._ids[element]
        wired = self._events[of, event]
        status, content = self._http.ask(
            self._api,
            {
                "data": [self._values[one] for one in wired["inputs"]],
                "fn_index": wired["id"],
                "trigger_id": of,
                "session_hash": self._session,
                "event_data": data,
            },
        )
        if status != 200:
            raise Failed(f"{element} {event}: {status} {content[:300].decode(errors='replace')}")
        for one, shown in zip(wired["outputs"], json.loads(content)["data"], strict=True):
            if not isinstance(shown, dict) or shown.get("__type__") != "update":
                self._values[one] = shown
            elif "value" in shown:
                self._values[one] = shown["value"]


def _shown(component: Mapping[str, Any]) -> Value:
    """A component's initial value; an empty text field is "" to the browser."""
    value = component["props"].get("value")
    return "" if value is None and component["type"] == "textbox" else value
