"""Without a seed one is drawn, and recorded wherever the answer is, so that it can be repeated."""

from __future__ import annotations

import io
import json
import zipfile

import pandas as pd
import pytest
from fastapi.testclient import TestClient

from app.server.api import build_app
from app.services.host import Host
from app.ui.tabs.messages import statistics
from tests.app.conftest import ended
from tests.app.served import ask


def test_every_answer_has_a_seed_in_store_line_and_export(host: Host) -> None:
    assert host.chats.sampling.seed == -1
    assert host.chats.set_sampling(temperature=0.5, top_k=7) == ""
    chat = ended(host.chats.ask(None, "first")).chat_id
    assert chat is not None
    ended(host.chats.ask(chat, "second"))
    assert host.chats.set_sampling(seed=11, temperature=0) == ""
    ended(host.chats.ask(chat, "third"))
    told = [m for m in host.chats.messages(chat) if m.role == "assistant"]
    drawn = [m.stats and m.stats["sampling"] for m in told]
    assert [(one["temperature"], one["top_k"]) for one in drawn if one] == [(0.5, 7), (0.5, 7), (0.0, 7)]
    seeds = [m.stats["seed"] for m in told if m.stats]
    assert seeds == [one["seed"] for one in drawn if one]
    assert seeds[2] == 11
    assert len(set(seeds)) == 3, "the same random seed twice"
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert f"seed {seeds[0]}" in statistics(told[0])
    assert "seed" not in statistics(told[2]), "without sampling nothing hangs on it"
    with TestClient(build_app(host), base_url="http://127.0.0.1") as client:
        archive = zipfile.ZipFile(io.BytesIO(client.get(f"/export/{chat}.zip").content))
    rows = pd.read_csv(archive.open("answers.csv"))
    assert rows["seed"].tolist() == seeds
    assert rows["top_k"].tolist() == [7, 7, 7]
    assert rows["temperature"].tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize(("asked", "told"), [({"seed": 5}, 5), ({}, None), ({"seed": -1}, None)])
def test_the_api_says_which_seed_it_used(host: Host, asked: dict[str, int], told: int | None) -> None:
    with TestClient(build_app(host), base_url="http://127.0.0.1") as client:
        whole = client.post("/v1/chat/completions", json=ask("hello", max_tokens=1, **asked)).json()["seed"]
        lines = client.post("/v1/chat/completions", json=ask("hello", max_tokens=1, stream=True, **asked)).text
    streamed = json.loads(lines.split("data: ")[-2])["seed"]
    assert (whole, streamed) == (told, told) if told is not None else whole != streamed
