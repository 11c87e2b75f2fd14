"""Values that no event of the dashboard can mean: refused at the door, or told on the page; never an error of ours."""

from __future__ import annotations

import json

import pytest
from fastapi.testclient import TestClient

from app.services.host import Host
from tests.app.conftest import ended
from tests.security.conftest import config
from tests.selection import layered

# What a page begins with whose address says ?chat=1e30.
FAR = {"open": True, "chat": 1e30, "stamp": "", "turn": "", "sent": False}
JSON = {"content-type": "application/json"}


VALUES = ("\ud800", 2**63, json.loads("[" * 200 + "]" * 200))


@pytest.mark.parametrize("one_in", layered([7, 1], quick=lambda one_in: one_in == 7))
def test_every_event_refuses_what_nothing_behind_it_could_take(client: TestClient, one_in: int) -> None:
    asked = [(event, value) for event in config(client)["dependencies"] for value in VALUES]
    for event, value in asked[::one_in]:  # each value, and one in so many events
        body = {
            "data": [value for _ in event["inputs"]],
            "event_data": value,
            "fn_index": event["id"],
            "session_hash": "me",
        }
        reply = client.post("/gradio_api/run/predict", content=json.dumps(body), headers=JSON)
        assert reply.status_code == 400, (event["api_name"], reply.text)


@pytest.mark.parametrize(
    ("element", "event", "data"),
    [
        ("message", "submit", ["hello", FAR, ""]),
        ("chat", "select", [FAR, ""]),
        ("tail", "end", [FAR, ""]),
        ("stop", "click", [FAR]),
    ],
)
def test_a_chat_of_a_number_beyond_all_is_told_on_the_page(
    client: TestClient, host: Host, element: str, event: str, data: list[object]
) -> None:
    page = config(client)
    component = next(c["id"] for c in page["components"] if c["props"].get("elem_id") == element)
    found = next(one for one in page["dependencies"] if [component, event] in one["targets"])
    body = {"data": data, "fn_index": found["id"], "session_hash": "me", "event_data": {"do": "regenerate", "id": 1}}
    reply = client.post("/gradio_api/run/predict", json=body)
    assert reply.status_code == 200, reply.text
    assert element == "stop" or "no number so large" in reply.text or "no longer exists" in reply.text
    ended(host.chats.ask(None, "hello"))
