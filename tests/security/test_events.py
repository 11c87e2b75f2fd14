"""Events of the page: which a client may send, with which values."""

import json
import logging
from collections.abc import Callable
from typing import Any

import gradio as gr
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from app.server.security.events import Events
from app.server.security.gradio_guard import NO_EVENT
from app.services.host import Host
from tests.app.conftest import ended
from tests.logged import Logged
from tests.security.conftest import config
from tests.selection import layered

Body = dict[str, Any]
EVENT_DATA = {
    "stamp": "",
    "dark": True,
    "budget": "50%",
    "policy": "lru",
    "preset": "lru",
    "best": "",
    "sort": "name",
    "do": "edit",
    "id": 1,
    "text": "x",
    "source": "models/nowhere",
}
PREDICT = "/gradio_api/run/predict"
MALFORMED: dict[str, Callable[[Body], Any]] = {
    "no object": lambda body: [body],
    "a text": lambda body: "event",
    "no event": lambda body: {**body, "fn_index": None},
    "an event too many": lambda body: {**body, "fn_index": 99_999},
    "a negative event": lambda body: {**body, "fn_index": -body["fn_index"] - 1},
    "a named event": lambda body: {**body, "fn_index": str(body["fn_index"])},
    "half an event": lambda body: {**body, "fn_index": body["fn_index"] + 0.5},
    "a true event": lambda body: {**body, "fn_index": True},
    "an endless trigger": lambda body: {**body, "trigger_id": float("inf")},
    "a listed trigger": lambda body: {**body, "trigger_id": [1]},
    "a true trigger": lambda body: {**body, "trigger_id": True},
    "no session": lambda body: {**body, "session_hash": None},
    "a path as session": lambda body: {**body, "session_hash": "../../x"},
    "a session in lines": lambda body: {**body, "session_hash": "a\n"},
    "a long session": lambda body: {**body, "session_hash": "a" * 65},
    "no data": lambda body: {name: body[name] for name in body if name != "data"},
    "data by name": lambda body: {**body, "data": {"0": 1}},
    "too much data": lambda body: {**body, "data": [*body["data"], None]},
    "too little data": lambda body: {**body, "data": body["data"][:-1] if body["data"] else [1]},
    "a field of Gradio's queue": lambda body: {**body, "batched": True},
}
WRONG = [{"a": 1}, [[]], [None], [True], {"path": "", "meta": {"_type": "gradio.FileData"}}, float("nan"), 1e300]


def sent(client: TestClient) -> list[Body]:
    """Every event as the page would send it after it was opened."""
    page = config(client)
    values = {one["id"]: one["props"].get("value") for one in page["components"]}
    return [
        {
            "data": [values[i] for i in event["inputs"]],
            "event_data": EVENT_DATA,
            "fn_index": event["id"],
            "trigger_id": None,
            "session_hash": "m1x2",
        }
        for event in page["dependencies"]
        if event.get("backend_fn", True)
    ]


def post(client: TestClient, body: object) -> tuple[int, str]:
    reply = client.post(PREDICT, content=json.dumps(body), headers={"content-type": "application/json"})
    return reply.status_code, reply.json().get("error") or ""


@pytest.fixture
def quiet(caplog: Logged, capfd: pytest.CaptureFixture[str]) -> Callable[[], bool]:
    """Was nothing logged as an error, and no traceback printed?"""

    def nothing() -> bool:
        told = "".join(capfd.readouterr())
        return "Traceback" not in told and not [r for r in caplog.records if r.levelno >= logging.ERROR]

    return nothing


@pytest.fixture(scope="module")
def events(page: FastAPI) -> Events:
    mounted: Any = page.routes[-1]
    return Events(mounted.app.get_blocks())


def listed(body: Body) -> Body:
    """What is done in the list of chats, where an action on a message is meant."""
    return {**body, "event_data": {**EVENT_DATA, "do": "open"}}


def test_what_the_page_sends_after_it_was_opened_is_taken(client: TestClient, events: Events) -> None:
    bodies = sent(client)
    assert len(bodies) > 150
    for body in bodies:
        assert "" in (events.wrong(body), events.wrong(listed(body))), (body["fn_index"], events.wrong(body))


@pytest.mark.parametrize("one_in", layered([61, 7], quick=lambda one_in: one_in == 61))
def test_every_event_refuses_what_is_malformed(
    client: TestClient, events: Events, quiet: Callable[[], bool], one_in: int
) -> None:
    """All through the table, and one in so many through the whole application, each kind among them."""
    posted = set()
    for number, body in enumerate(sent(client)):
        for at, (name, change) in enumerate(MALFORMED.items()):
            strange = change(body)
            assert events.wrong(strange).startswith(NO_EVENT), (number, name)
            if (number * len(MALFORMED) + at) % one_in == 0:
                posted.add(name)
                status, told = post(client, strange)
                assert status == 400 and told.startswith(NO_EVENT), (number, name, told)
    assert quiet() and posted == MALFORMED.keys()


def test_every_input_refuses_values_of_other_types(
    client: TestClient, events: Events, quiet: Callable[[], bool]
) -> None:
    for body in sent(client):
        for at in range(len(body["data"])):
            for value in WRONG:
                strange = {**body, "data": [*body["data"][:at], value, *body["data"][at + 1 :]]}
                assert events.wrong(strange), (body["fn_index"], at, value)
        if body["data"]:
            status, told = post(client, {**body, "data": [WRONG[body["fn_index"] % len(WRONG)]] * len(body["data"])})
            assert status == 400 and told, body["fn_index"]
    assert quiet()


def test_inputs_that_are_empty_are_told_or_refused(client: TestClient, quiet: Callable[[], bool]) -> None:
    for body in sent(client):
        if body["data"]:
            status, told = post(client, listed({**body, "data": [None] * len(body["data"])}))
            assert status == 200 or (status == 400 and told), (body["fn_index"], told)
    assert quiet()


def test_event_data_is_needed_where_a_handler_takes_it(
    client: TestClient, events: Events, quiet: Callable[[], bool]
) -> None:
    taking = {one["id"] for one in config(client)["dependencies"] if one["collects_event_data"]}
    assert len(taking) == 17
    for body in sent(client):
        if body["fn_index"] in taking:
            for data in (None, [EVENT_DATA], "\0", {"stamp": 1, "dark": 1, "entry": 1, "do": 1}, {"sort": ["name"]}):
                status, told = post(client, {**body, "event_data": data})
                assert status == 400 and "event_data" in told, (body["fn_index"], data)
        else:  # as the page sends when boxes were ticked, and when a slider is let go
            assert not any("event_data" in events.wrong({**body, "event_data": data}) for data in (["counts"], 2, None))
    assert quiet()


def find(client: TestClient, element: str) -> tuple[Body, int]:
    """The first event with this input, and the input's place in it."""
    page = config(client)
    ids = {one["props"].get("elem_id"): one["id"] for one in page["components"]}
    inputs = {one["id"]: one["inputs"] for one in page["dependencies"]}
    body = next(body for body in sent(client) if ids[element] in inputs[body["fn_index"]])
    return body, inputs[body["fn_index"]].index(ids[element])


@pytest.mark.parametrize(
    ("element", "value", "told"),
    [
        ("set-budget", 101, "“Budget (% of experts)” takes numbers from 5 up to 100."),
        ("set-budget", "50", "Input 1 (Budget (% of experts)) has to be a number."),
        ("set-budget", None, "“Budget (% of experts)” needs a number."),
        ("set-eviction", "nrf", "does not offer 'nrf' any more. Reload the page."),
        ("models", {"html": "", "sort": "used"}, "has to be as the page holds it."),
        (
            "tail",
            {"open": False, "chat": "1", "stamp": "", "turn": "", "sent": False},
            "has to be as the page holds it.",
        ),
        ("import-download", 1, "has to be true or false."),
        ("whatif-policies", "lru", "has to be a list of its choices."),
        ("chats", True, "has to be a choice."),
        ("chats", 99_999, "does not offer '99999' any more. Reload the page."),
    ],
)
def test_what_is_wrong_is_said(
    client: TestClient, element: str, value: object, told: str, quiet: Callable[[], bool]
) -> None:
    body, at = find(client, element)
    body["data"][at] = value
    status, said = post(client, body)
    assert status == 400 and said.endswith(told)
    assert quiet()


def test_choices_that_the_server_gave_a_tab_later_are_taken(client: TestClient, events: Events) -> None:
    """A tab that asked for the recordings there are may choose among them; another tab may not."""
    body, at = find(client, "whatif-source")
    opened = next(one["id"] for one in config(client)["dependencies"] if one["api_name"] == "look_1")
    status, _ = post(client, {"data": [None], "fn_index": opened, "session_hash": "asked"})
    assert status == 200
    body["data"][at] = "file"
    assert events.wrong({**body, "session_hash": "asked"}) == ""
    assert "does not offer 'file'" in events.wrong({**body, "session_hash": "other"})


def test_a_file_of_another_kind_or_one_that_is_gone_is_refused(client: TestClient, quiet: Callable[[], bool]) -> None:
    body, at = find(client, "whatif-upload")
    (path,) = client.post("/gradio_api/upload", files={"files": ("my.txt", b"routing")}).json()
    for name, told in ((path, "“A trace file"), (f"{path}.gone", "has to be a file that was uploaded.")):
        body["data"][at] = {"path": name, "meta": {"_type": "gradio.FileData"}}
        status, said = post(client, body)
        assert status == 400 and told in said
    assert quiet()


def test_a_page_whose_inputs_or_event_data_are_unknown_is_not_served() -> None:
    with gr.Blocks() as page:
        gr.Button().click(lambda colour: None, gr.ColorPicker())
    with pytest.raises(TypeError, match="ColorPicker"):
        Events(page)

    def picked(data: gr.EventData) -> None: ...

    with gr.Blocks() as page:
        gr.Button().click(picked)
    with pytest.raises(TypeError, match="EventData"):
        Events(page)


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
