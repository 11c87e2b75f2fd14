"""The routes: health, binary frames, exports, the OpenAI subset, and who is let in."""

import io
import json
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from app.server import frames
from app.server.api import build_app
from app.services.exports import archive
from app.services.host import Host
from core import __version__
from core.types import Frame
from tests.app.conftest import WAIT_S, asked
from tests.fake_models import SHAPE

HOME = "http://127.0.0.1:7860"


@pytest.fixture
def client(host: Host) -> Iterator[TestClient]:
    with TestClient(build_app(host), base_url=HOME) as client:
        yield client


def test_health_tells_what_is_loaded(client: TestClient, host: Host) -> None:
    assert client.get("/healthz").json() == {
        "status": "ok",
        "model": "demo",
        "busy": False,
        "waiting": 0,
        "one_at_a_time": "",
        "arithmetic": "reference",
        "fallback": "",
        "distance": None,
        "loading": None,
        "importing": None,
        "version": __version__,
    }
    host.models.unload()
    assert client.get("/healthz").json()["model"] is None


def test_a_frame_survives_the_wire(client: TestClient, host: Host) -> None:
    asked(host)
    answer = client.get("/live/frame?layer=2")
    assert answer.headers["content-type"] == "application/octet-stream"
    head, arrays = frames.decode(answer.content)
    frame = host.models.frame(2)
    assert head["model"] == "demo"
    assert head["version"] == answer.headers["x-version"]
    assert head["shape"] == {**asdict(SHAPE), "layers": 4}
    assert head["memory"]["dense"] == frame.memory.dense
    assert {"step", "decode", "started_s", "requests", "hits", "demand_bytes", "disk_bytes"} <= frame.columns.keys()
    for name, column in {"hit_rate": frame.hit_rate, **frame.columns}.items():
        assert arrays[name].dtype == column.dtype
        assert arrays[name].tolist() == column.tolist()
    assert arrays["place"].shape == (4, 16)
    assert head["coactivation_max"] == frame.coactivation.max()
    assert arrays["coactivation"].dtype == np.uint8


def test_arrays_are_aligned_for_typed_arrays_and_nan_is_null(host: Host) -> None:
    frame = host.models.frame()
    frame.place = np.zeros((3, 3), np.uint8)  # 9 bytes: what follows must be moved to 12
    frame.hit, frame.hit_rate[1] = float("nan"), np.nan
    data = frames.encode(frame, model="demo")
    start = 4 + int.from_bytes(data[:4], "little")
    assert start % 4 == 0
    text = data[4:start].decode()
    assert "NaN" not in text
    head = json.loads(text)
    assert head["hit"] is None
    assert all(one["offset"] % 4 == 0 for one in head["arrays"])
    _, arrays = frames.decode(data)
    assert np.isnan(arrays["hit_rate"]).tolist() == [False, True, False, False]
    assert arrays["coactivation"].shape == (16, 16)


@pytest.mark.parametrize("top", [0, 1, 2, 3_000_000_000])
def test_the_log_scale_spans_zero_to_255_in_order(top: int) -> None:
    counts = np.array([0, min(1, top), top // 1000, top], np.uint32)
    largest, scaled = frames.log_scale(counts)
    assert largest == top
    assert scaled[0] == 0
    assert scaled[-1] == (255 if top else 0)
    assert (np.diff(scaled.astype(int)[[0, 2, 3]]) >= 0).all()
    assert top == 0 or scaled[1] > 0, "a pair that met once looks as if it never had"


def test_nothing_is_sent_when_nothing_changed(client: TestClient, host: Host) -> None:
    first = client.get("/live/frame?layer=1&since=-1")
    same = client.get(f"/live/frame?layer=1&since={first.headers['x-version']}")
    assert (same.status_code, same.content) == (204, b"")
    assert client.get(f"/live/frame?layer=0&since={first.headers['x-version']}").status_code == 200, "another layer"
    asked(host)
    assert client.get(f"/live/frame?layer=1&since={first.headers['x-version']}").status_code == 200, "more tokens"


def test_a_reload_is_a_change_even_at_the_same_engine_version(client: TestClient, host: Host) -> None:
    before = client.get("/live/frame").headers["x-version"]
    loading = host.loader.load(host.loader.plan("demo"))
    assert loading.join(WAIT_S)
    assert client.get(f"/live/frame?since={before}").status_code == 200


def test_without_a_model_the_frame_says_so(client: TestClient, host: Host) -> None:
    host.models.unload()
    answer = client.get("/live/frame")
    head, arrays = frames.decode(answer.content)
    assert (answer.status_code, head["model"], arrays) == (200, None, {})
    assert client.get(f"/live/frame?since={head['version']}").status_code == 204


def test_a_layer_that_is_not_there_is_told_and_no_documentation_served(client: TestClient) -> None:
    answer = client.get("/live/frame?layer=4")
    assert answer.status_code == 400
    assert "choose 0 to 3" in answer.json()["error"]["message"]
    assert client.get("/live/frame?layer=x").status_code == 422
    assert {client.get(url).status_code for url in ("/docs", "/redoc", "/openapi.json")} == {404}


def test_a_chat_and_the_session_are_downloaded_and_not_left_behind(client: TestClient, host: Host) -> None:
    chat = asked(host)
    for url in (f"/export/{chat}.zip", "/export/session.zip", f"/export/session.zip?load={host.models.load_id}"):
        answer = client.get(url)
        assert answer.status_code == 200, answer.text
        assert "attachment" in answer.headers["content-disposition"]
        with zipfile.ZipFile(io.BytesIO(answer.content)) as archive:
            assert archive.read("tokens.csv").count(b"\n") == 14
    assert list((host.store.folder / "exports").iterdir()) == []


def test_exports_that_cannot_be_made_are_told(client: TestClient, host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = client.get("/export/99.zip")
    assert (missing.status_code, "no longer exists" in missing.text) == (404, True)
    chat = asked(host)

    def full(*_: Any, **__: Any) -> Path:
        raise archive.ExportError("The disk is full: the export was not written.")

    monkeypatch.setattr(archive, "write", full)
    answer = client.get(f"/export/{chat}.zip")
    assert (answer.status_code, answer.text) == (507, "The disk is full: the export was not written.")


ASK: dict[str, Any] = {
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}],
    "max_tokens": 3,
    "temperature": 0,
}


def test_models_and_a_whole_completion(client: TestClient, host: Host) -> None:
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["demo"]
    told = client.post("/v1/chat/completions", json=ASK).json()
    assert told["object"] == "chat.completion"
    assert told["choices"] == [
        {"index": 0, "message": {"role": "assistant", "content": "the cache keeps "}, "finish_reason": "length"}
    ]
    assert told["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 3,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    assert host.store.chats.all() == [], "the API's answers are nobody's chat"
    assert host.models.load_id is not None
    assert len(list(host.store.steps.records(load=host.models.load_id))) == 4, "but their figures are recorded"


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/chat/completions", b"{", 400),
        ("POST", "/chat/completions", b"[" * 100_000, 400),
        ("POST", "/chat/completions", b"\xff", 400),
        ("POST", "/chat/completions", b"", 400),
        ("GET", "/chat/completions", b"", 404),
        ("DELETE", "/models", b"", 404),
        ("GET", "/nothing", b"", 404),
    ],
)
def test_api_errors_have_their_form(client: TestClient, method: str, path: str, body: bytes, status: int) -> None:
    answer = client.request(method, f"/v1{path}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_without_a_model_a_completion_is_refused(client: TestClient, host: Host) -> None:
    host.models.unload()
    answer = client.post("/v1/chat/completions", json=ASK)
    assert (answer.status_code, "No model is loaded" in answer.text) == (409, True)
    assert client.get("/v1/models").json()["data"] == []


@pytest.mark.long(0.1)
def test_frames_may_be_asked_for_while_the_model_comes_and_goes(tmp_path: Path, client: TestClient, host: Host) -> None:
    import threading

    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            answer = client.get("/live/frame")
            if answer.status_code != 200:
                wrong.append(answer.text)

    looker = threading.Thread(target=look)
    looker.start()
    for _ in range(20):
        host.models.unload()
        assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    stop.set()
    looker.join(WAIT_S)
    assert wrong == []
    assert isinstance(host.models.frame(), Frame)
