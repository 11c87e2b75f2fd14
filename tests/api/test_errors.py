"""What cannot be answered is an error in the form of the API that was asked; and /metrics in Prometheus' form."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.server.security.access import Access
from app.services.host import Host
from app.wording import model_id
from core.errors import ContextError, DeviceError, ModelError, PromptError
from core.metrics import METRICS, Phase
from tests.api.conftest import HOME, Start, events, saying
from tests.app.conftest import WAIT_S, ended, open_host
from tests.app.served import eventually

MESSAGES, COMPLETE = "/v1/messages", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
TOKEN = "a-token_of.this~test"
FORMS = ("chat/completions", "messages", "responses", "completions")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    host = open_host(tmp_path_factory.mktemp("home"), saying("Caches work."))
    yield host
    host.close()


@pytest.fixture(scope="module")
def client(host: Host) -> Iterator[TestClient]:
    with TestClient(build_app(host), base_url=HOME, raise_server_exceptions=False) as client:
        yield client


def refused(reply: Any, status: int, kind: str) -> dict[str, Any]:
    """The error of a response in Anthropic's form."""
    assert reply.status_code == status, reply.text
    body: dict[str, Any] = reply.json()
    assert body.keys() == {"type", "error"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


DEEP = b'{"messages": ' + b"[" * 200 + b"]" * 200 + b"}"


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/count_tokens"])
@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        ({"content": DEEP, "headers": JSON}, 400, "invalid_request_error"),
        ({"content": b"{", "headers": JSON}, 400, "invalid_request_error"),
        ({"content": b"\xff", "headers": JSON}, 400, "invalid_request_error"),
        ({"content": b"{}"}, 415, "invalid_request_error"),
        ({"content": b"x" * (17 << 20), "headers": JSON}, 413, "request_too_large"),
        ({"json": {}}, 400, "invalid_request_error"),
        ({"json": {"messages": HELLO, "model": "other"}}, 404, "not_found_error"),
        ({"json": {"messages": HELLO}, "headers": {"origin": "http://evil.example"}}, 403, "permission_error"),
        ({"json": {"messages": HELLO}, "headers": {"host": "evil.example"}}, 400, "invalid_request_error"),
    ],
)
def test_errors_of_messages(client: TestClient, path: str, sent: dict[str, Any], status: int, kind: str) -> None:
    refused(client.post(path, **sent), status, kind)


def test_so_are_those_of_routes_and_methods_that_there_are_not(client: TestClient) -> None:
    assert "GET /v1/messages" in refused(client.get(MESSAGES), 404, "not_found_error")["message"]
    refused(client.post(f"{MESSAGES}/batches", json={}), 404, "not_found_error")
    refused(client.request("TRACE", MESSAGES), 405, "invalid_request_error")
    assert "type" not in client.post("/v1/messagesx", json={}).json(), "another path"


def test_so_is_that_of_a_missing_token(host: Host) -> None:
    with TestClient(build_app(host, access=Access("127.0.0.1", TOKEN)), base_url=HOME) as client:
        refused(client.post(MESSAGES, json={"messages": HELLO}), 401, "authentication_error")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "anthropic"),
    [
        (PromptError("It takes no such chat."), 400, "invalid_request_error", None, "invalid_request_error"),
        (ContextError("Too long."), 400, "invalid_request_error", "context_length_exceeded", "invalid_request_error"),
        (ModelError("It is damaged."), 500, "server_error", None, "api_error"),
        (RuntimeError("secret"), 500, "server_error", None, "api_error"),
    ],
)
def test_a_failure_says_whose_it_is(
    start: Start, error: Exception, status: int, kind: str, code: str | None, anthropic: str
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    client, _, _ = start(generate=fail)
    for path in FORMS:
        asked = {{"completions": "prompt", "responses": "input"}.get(path, "messages"): "x"}
        asked = asked if "messages" not in asked else {"messages": HELLO}
        reply, streamed = (client.post(f"/v1/{path}", json={**asked, "stream": stream}) for stream in (False, True))
        assert (reply.status_code, streamed.status_code) == (status, 200)
        assert "secret" not in reply.text + streamed.text
        assert isinstance(error, RuntimeError) or reply.json()["error"]["message"] == str(error)
        [last] = [(name, data) for name, data in events(streamed.text) if "error" in data]
        for told in (reply.json(), last[1]):
            assert told["error"]["type"] == (anthropic if path == "messages" else kind)
            assert path == "messages" or told["error"]["code"] == code
        if path in ("messages", "responses"):
            assert (last[0], last[1]["type"]) == ("error", "error")


@pytest.mark.parametrize(
    ("error", "status", "kind"), [(RuntimeError("x"), 500, "api_error"), (DeviceError("x"), 503, "overloaded_error")]
)
def test_so_is_that_of_a_route_that_fails(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int, kind: str
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("app.server.v1.messages.prompt", fail)
    refused(client.post(MESSAGES, json={"messages": HELLO}), status, kind)


@pytest.mark.parametrize("path", FORMS)
def test_a_body_that_is_no_json_is_refused_with_the_place(client: TestClient, path: str) -> None:
    error = client.post(f"/v1/{path}", content=b'{"messages": [1 2]}', headers=JSON).json()["error"]
    assert error["message"] == "The body is not JSON: Expecting ',' delimiter at character 16."
    assert (error["param"], error["code"]) == (None, "invalid_json")
    reply = client.post(f"/v1/{path}", content=b"{}", headers={"content-type": "text/plain"})
    assert reply.status_code == 415 and "Content-Type: application/json" in reply.json()["error"]["message"]
    assert client.post(f"/v1/{path}", json=[]).json()["error"]["message"] == "The body: Give an object."


def form_of(path: str, schema: Any) -> tuple[dict[str, Any], str]:
    """A request for an answer of a JSON schema, and the name of its field."""
    flat = {"type": "json_schema", "name": "x", "schema": schema}
    nested = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    match path:
        case "chat/completions":
            return {"messages": HELLO, "response_format": nested}, "response_format"
        case "completions":
            return {"prompt": "x", "response_format": nested}, "response_format"
        case "responses":
            return {"input": "x", "text": {"format": flat}}, "text.format"
    return {"messages": HELLO, "output_config": {"format": flat}}, "output_config.format"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        ({"$ref": "#/nope"}, "'/nope' does not exist"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
    ],
)
def test_a_schema_that_cannot_be_kept_to(client: TestClient, path: str, schema: Any, reason: str, stream: bool) -> None:
    pytest.importorskip("llguidance", reason="the package llguidance is not installed")
    body, field = form_of(path, schema)
    reply = client.post(f"/v1/{path}", json={**body, "stream": stream})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert error["message"].startswith(f"{field}: The answer cannot keep to this JSON schema: ")
    assert reason in error["message"]


@pytest.fixture
def folders(host: Host, client: TestClient, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], str]:
    """As if the model of this path were loaded; its id."""

    def id_of(path: object) -> str:
        loaded = host.models.loaded
        named = replace(loaded, spec=replace(loaded.spec, model=str(path)))
        monkeypatch.setattr(host.models, "_loaded", named)
        [listed] = client.get("/v1/models").json()["data"]
        name: str = listed["id"]
        return name

    return id_of


def test_models_have_names_and_no_paths(client: TestClient, folders: Callable[[object], str], tmp_path: Path) -> None:
    one, other = (folders(tmp_path / folder / "Qwen3-30B") for folder in "ab")
    assert one.partition("@")[0] == other.partition("@")[0] == "Qwen3-30B" and one != other
    text = {"prompt": "x", "max_tokens": 1}
    reply = client.post("/v1/completions", json={**text, "model": other})
    assert (reply.status_code, reply.json()["model"]) == (200, other)
    assert client.get(f"/v1/models/{other}").json()["aliases"] == ["Qwen3-30B"]
    for name in ("Qwen3-30B", str(tmp_path / "b" / "Qwen3-30B"), None):
        assert client.post("/v1/completions", json={**text, "model": name}).status_code == 200
    refused = client.post("/v1/completions", json={**text, "model": one})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    assert "'Qwen3-30B'" in refused.text
    texts = [
        refused.text,
        reply.text,
        *(client.get(path).text for path in ("/v1/models", f"/v1/models/{other}", "/metrics", "/healthz")),
        *(client.get(path).text for path in ("/live/frame", "/v1/models/none")),
        client.post(MESSAGES, json={"messages": HELLO, "max_tokens": 1, "stream": True}).text,
        client.post("/v1/responses", json={"input": "x", "stream": True}).text,
        client.post(COMPLETE, json={"messages": HELLO}).text,
    ]
    assert not [text for text in texts if str(tmp_path) in text]
    assert f'model="{other}"' in texts[4] and json.loads(texts[5])["model"] == other
    assert folders(f"{tmp_path}/b/Qwen3-30B/") == other, "however it is written"


def test_models_of_the_hub_have_names(client: TestClient, folders: Callable[[object], str], tmp_path: Path) -> None:
    name = folders(tmp_path / "models--Qwen--Qwen3-30B" / "snapshots" / "abc")
    assert name.startswith("Qwen/Qwen3-30B@")
    for known in (name, "Qwen/Qwen3-30B", "Qwen3-30B"):
        assert client.get(f"/v1/models/{known}").json()["id"] == name
    assert folders("C:\\models\\Qwen3-30B").startswith("Qwen3-30B@")


def test_exports_have_no_paths(tmp_path: Path) -> None:
    host = open_host(tmp_path / "home", saying("Caches work."), loaded=False)
    folder = tmp_path / "secret place" / "Qwen3"
    folder.mkdir(parents=True)
    try:
        assert host.loader.load(host.loader.plan(str(folder))).join(WAIT_S)
        chat = ended(host.chats.ask(None, "hello")).chat_id
        with TestClient(build_app(host), base_url=HOME) as client:
            files = {end: client.get(f"/export/{chat}.{end}").content for end in ("md", "json", "zip", "trace")}
        archive = ZipFile(BytesIO(files["zip"]))
        files |= {name: archive.read(name) for name in archive.namelist()}
    finally:
        host.close()
    assert not [name for name, content in files.items() if b"secret place" in content]
    assert b"Qwen3" in files["md"] and b"Qwen3@" in files["json"] and b"Qwen3@" in files["manifest.json"]


SAMPLE = re.compile(r'^(moestro_[a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)$')


def read(text: str) -> tuple[dict[str, str], dict[str, float]]:
    """Kind of each family, and value of each sample by its name and labels."""
    kinds: dict[str, str] = {}
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split()
            assert name not in kinds, "a family comes twice"
            kinds[name] = kind
        elif not line.startswith("# HELP "):
            found = SAMPLE.match(line)
            assert found, line
            assert found[1] in kinds, "a sample without its family"
            samples[f"{found[1]}{{{found[2] or ''}}}"] = float(found[3])
    assert text.endswith("\n")
    return kinds, samples


def test_what_passes_came_to_is_counted_by_phase(start: Start) -> None:
    client, host, _ = start("one two three")
    assert "moestro_tokens_total" not in client.get("/metrics").text
    for _ in range(2):
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    kinds, samples = read(reply.text)
    assert host.models.load_id is not None
    records = list(host.store.steps.records(load=host.models.load_id))
    phases: tuple[Phase, ...] = ("prefill", "decode")
    for phase in phases:
        steps = [one for one in records if one.phase == phase]
        assert samples[f'moestro_passes_total{{phase="{phase}"}}'] == len(steps) > 0
        assert samples[f'moestro_requests_total{{phase="{phase}"}}'] == sum(one.requests for one in steps)
        assert samples[f'moestro_hits_total{{phase="{phase}"}}'] == sum(one.hits for one in steps)
        assert samples[f'moestro_demand_bytes_total{{phase="{phase}"}}'] == sum(one.demand_bytes for one in steps)
        assert samples[f'moestro_total_seconds_total{{phase="{phase}"}}'] == pytest.approx(0.02 * len(steps))
    assert samples["moestro_slots{}"] == records[-1].slots
    eventually(lambda: 'moestro_answers_total{reason="stop"} 2.0' in client.get("/metrics").text)
    assert kinds["moestro_model_info"] == "gauge"
    names = {re.sub("_(ms|s)$", "_seconds", one.name) for one in METRICS if not isinstance(one.reduce, tuple)}
    ends = ("", "_total", "_passes_total")
    assert not [name for name in names if not any(f"moestro_{name}{end}" in kinds for end in ends)]
    assert kinds["moestro_slots"] == kinds["moestro_net_seconds"] == "gauge"
    assert kinds["moestro_exact_passes_total"] == kinds["moestro_hits_total"] == "counter"


def test_labels_hold_any_text(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    client, host, _ = start()
    monkeypatch.setattr(type(host.models), "model_id", property(lambda self: model_id('C:\\a "b"\nc')))
    assert 'model="a \\"b\\"\\nc@' in client.get("/metrics").text
