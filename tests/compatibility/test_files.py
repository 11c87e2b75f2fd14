"""Files that an earlier version wrote: they open, say the same, and give the same figures.

`files/` was written by commit b6ea62f (November 2026): a database with two chats of the demo model and settings of
every group, a profile and a trace of the same chats, a pack of a tiny qwen3_moe checkpoint, and `simulate`'s figures
for that trace. They are never written anew: where a format or a name changes, this shows that old ones are still read.
Three kinds of figures are later ones: those of prefetchers, since a prefetch that landed in vain gives up its slot (and
one of the oracle's, since ever more residents of a prompt are computed at a time), those of random eviction and of
Belady, since a prompt's missing experts take a slot each as it falls free, not half a layer's at a time, and those of
LCP, since it counts the tokens of a prompt.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import cli
from app.services.host import Host
from app.store import Store
from core.engine import Engine
from core.memory.pack import verify
from core.profile import load
from core.settings.loading import LoadSpec
from core.settings.sampling import Sampling
from tests.app.conftest import WAIT_S, QuickEngine
from tests.fake_models import fake_estimate
from tests.loaded import unloading

FILES = Path(__file__).parent / "files"
SETTINGS = {  # what the user had changed
    "budget": "60%",
    "eviction": "lcp",
    "pins": "1:3, 2:5",
    "predictor": "transitions",
    "link": "emulated",
    "link_gbps": 2.5,
    "miss": "substitute_drop",
    "substitute": "cache_prior",
    "rho": 3,
    "predictor.width": 6,
}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    shutil.copy(FILES / "moestro.sqlite3", tmp_path)
    host = Host(Store(tmp_path), QuickEngine, fake_estimate)
    yield host
    host.close()


def test_a_database_keeps_its_chats_settings_and_measurements(host: Host) -> None:
    first, second = sorted(host.store.chats.all(), key=lambda chat: chat.id)
    assert [m.role for m in host.chats.messages(first.id)] == ["user", "assistant"] * 2
    assert host.chats.messages(second.id)[0].text == "Tell me of experts."
    answers = [m for m in host.chats.messages(first.id) if m.role == "assistant"]
    assert all(m.stats is not None and m.stats["new_tokens"] > 0 for m in answers)
    assert {name: host.models.settings[name] for name in SETTINGS} == SETTINGS
    assert (host.chats.sampling.max_new_tokens, host.chats.sampling.temperature, host.chats.sampling.seed) == (
        24,
        0.5,
        7,
    )
    spec = host.loader.last_spec()
    assert spec is not None and spec.model == "demo"


def test_an_old_chat_is_exported_and_gone_on_with(host: Host, tmp_path: Path) -> None:
    from app.services.exports import archive

    chat = min(one.id for one in host.store.chats.all())
    archive.write(host.store, tmp_path / "chat.zip", chat=chat)
    assert (tmp_path / "chat.zip").stat().st_size > 1000
    assert host.loader.load(host.loader.plan("demo")).join(WAIT_S)
    answer = host.chats.ask(chat, "Do you still know me?")
    assert answer.join(WAIT_S) and answer.error == ""
    assert len(host.chats.messages(chat)) == 6


def test_a_profile_opens() -> None:
    profile = load(FILES / "profile.safetensors")
    assert {"counts", "pairs"} <= set(profile.parts()) and profile.model == "demo"
    assert profile.peaks is None, "it was measured before there were any"


def test_a_pack_is_whole_and_answers() -> None:
    assert not verify(FILES / "pack").problems
    with unloading(Engine.load(LoadSpec(model=str(FILES / "pack"), context=64, arithmetic="reference"))) as engine:
        pieces = list(engine.generate("hello", Sampling(max_new_tokens=4, temperature=0.0)))
    assert pieces[-1].kind == "end" and sum(piece.kind == "token" for piece in pieces) == 4


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("caches", ["--slots", "25%,50%,75%"]),
        (
            "prefetchers",
            [
                "--predictors",
                "all",
                "--slots",
                "50%",
                "--compute-ms",
                "5",
                "--load-ms",
                "0.2",
                "--expert-ms",
                "0.02",
                "--profile",
                str(FILES / "profile.safetensors"),
                "--prefetch-guard",  # there was none
                "off",
            ],
        ),
    ],
)
def test_a_trace_gives_the_figures_that_it_gave(
    name: str, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", "--trace", str(FILES / "chat.trace"), *asked, "--processes", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for place, value in leaves(json.loads((FILES / "simulated.json").read_text())[name]):
        if {"least_stale", "expert_bytes"} & set(place):
            continue  # a policy that is gone, and what was None here
        now = at(found, place)
        assert now == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value), place


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every number and word of some JSON, with where it stands."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if entries is None:
        yield place, value
    else:
        for key, inner in entries:
            yield from leaves(inner, (*place, key))


def at(value: Any, place: tuple[Any, ...]) -> Any:
    """What stands there."""
    for key in place:
        value = value[key]
    return value
