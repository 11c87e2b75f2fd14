"""An export says how exact its answers are, and by which arithmetic."""

from pathlib import Path

import pytest

from app.server.live_state import host_state
from app.services.exports import archive
from app.services.host import Host
from core.engine.arithmetic import Arithmetic, Distance
from tests.app.conftest import WAIT_S, QuickEngine
from tests.app.test_export import ask, read


def test_a_model_that_is_exact_up_to_rounding_is_not_called_exact(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert host_state(host)["closeness"] == 0.0
    monkeypatch.setattr(QuickEngine, "closeness", 1e-6)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    tables, manifest = read(archive.write(host.store, tmp_path / "chat.zip", chat=ask(host, None, "How exact?")))
    assert host_state(host)["closeness"] == 1e-6
    assert (manifest["exact"], manifest["loads"][0]["closeness"]) == (False, 1e-6)
    assert tables["answers"][["exact", "closeness"]].to_numpy().tolist() == [[True, 1e-6]]


def test_the_fast_arithmetic_is_exact_and_named_with_its_distance(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what the page polls, in the manifest and beside every answer; answers of earlier versions are the
    reference's."""
    old = ask(host, None, "Which?")
    with host.store.db.tx() as db:
        db.execute("UPDATE messages SET stats = json_remove(stats, '$.arithmetic') WHERE chat = ?", [old])
    assert read(archive.write(host.store, tmp_path / "a.zip", chat=old))[0]["answers"]["arithmetic"][0] == "reference"
    distance = Distance(200, 0.0004, 0.0001, 0.01, 190, 5.0, 5.1, 0.02)
    monkeypatch.setattr(QuickEngine, "arithmetic", Arithmetic("fast", distance=distance))
    monkeypatch.setattr(QuickEngine, "closeness", 0.02)
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    tables, manifest = read(archive.write(host.store, tmp_path / "b.zip", chat=ask(host, None, "How exact?")))
    state = host_state(host)
    assert (state["arithmetic"], state["fallback"], state["distance"]["tokens"]) == ("fast", "", 200)
    assert manifest["exact"] is True and manifest["loads"][0]["distance"]["kl"] == 0.0004
    columns = ["exact", "arithmetic", "closeness", "distance_kl", "distance_tokens"]
    assert tables["answers"][columns].to_numpy().tolist() == [[True, "fast", 0.02, 0.0004, 200]]


def test_an_export_is_as_exact_as_its_answers(host: Host, tmp_path: Path) -> None:
    """What was set when the model was loaded does not matter once it is turned off."""
    host.models.change("miss", "drop")
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    lossy = ask(host, None, "Lossy?")
    host.models.change("miss", "wait")
    exact = ask(host, None, "Exact?")
    for chat, expected in ((lossy, False), (exact, True)):
        _, manifest = read(archive.write(host.store, tmp_path / f"{chat}.zip", chat=chat))
        assert manifest["exact"] is expected and manifest["loads"][-1]["exact"] is False
