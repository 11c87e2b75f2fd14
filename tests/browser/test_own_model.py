"""From the opened page to the first answer of a model of one's own: how many clicks, and how long they take.

A click is a press of the mouse or of Enter; what is typed or pasted is not counted. `-s` prints the figures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard
from tests.checkpoints import make_checkpoint
from tests.gguf_writer.write import make_gguf
from tests.pack.fake_hub import FakeHub
from tests.tiny_tokenizer import save_tokenizer

MOST = {"a folder": 3, "a GGUF file": 5, "the hub": 6}  # clicks


class Hand:
    """Uses a page, and counts its clicks."""

    def __init__(self, dashboard: Dashboard) -> None:
        self.dashboard, self.page = dashboard, dashboard.page
        self.clicks, self._began_s = 0, time.monotonic()

    def click(self, selector: str) -> None:
        self.clicks += 1
        self.page.click(selector)

    def enter(self, selector: str, text: str) -> None:
        self.clicks += 1
        box: Any = self.page.locator(selector)
        box.fill(text)
        box.press("Enter")

    def ask(self, what: str) -> None:
        """The first token of an answer is there; the clicks until then are within the limit."""
        self.enter("#message textarea", "Hello")
        self.dashboard.streaming(1)
        took_s = time.monotonic() - self._began_s
        print(f"\n{what}: {self.clicks} clicks, {took_s:.1f} s from the opened page to the first token")
        self.dashboard.stop()
        assert self.clicks <= MOST[what], f"{self.clicks} clicks"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    """A hub with one model."""
    folder = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path_factory.mktemp("hub") / "model"))
    server = FakeHub(folder, "somebody/Tiny-MoE")
    yield server
    server.close()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, hub: FakeHub) -> Iterator[Server]:
    """A dashboard of the real engine whose hub is this machine's; answers end when told."""
    home = tmp_path_factory.mktemp("home")
    environment = {"MOESTRO_TEST_ENGINE": "real", "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
    with Server(home, **environment).running() as server:
        yield server


@pytest.mark.long(0.4)
def test_a_folder_answers_after_three_clicks(open_page: Open, own: Server, tmp_path: Path) -> None:
    model = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "Mine"))
    hand = Hand(open_page(url=own.url))
    hand.enter("#model input", str(model))
    hand.dashboard.wait_text("#fit-chip", "free")
    hand.click("#load")
    hand.dashboard.loaded("Mine")
    hand.ask("a folder")


@pytest.mark.long(0.4)
def test_a_gguf_file_answers_after_five_clicks(open_page: Open, own: Server, tmp_path: Path) -> None:
    _, file = make_gguf("qwen3_moe", tmp_path)
    hand = Hand(open_page(url=own.url))
    hand.enter("#model input", str(file))
    hand.dashboard.wait_text("#fit-chip", "Import")
    hand.click("#fit-chip button")
    hand.page.wait_for_function("document.activeElement.id === 'import-start'")
    hand.click("#import-start")
    hand.click("#import-open")
    hand.dashboard.loaded("model-")
    hand.ask("a GGUF file")


@pytest.mark.long(0.4)  # tests/app/test_hub_search.py has what is found, what fits, and what goes wrong
def test_a_model_of_the_hub_is_found_downloaded_and_answers(open_page: Open, own: Server) -> None:
    hand = Hand(open_page(url=own.url))
    page = hand.page
    hand.clicks += 1
    page.get_by_role("tab", name="Library").click()
    page.wait_for_selector("#hub-search", state="hidden")
    hand.click("#import-download input")
    hand.enter("#hub-search :is(input, textarea)", "tiny")
    hand.click("#hub-found [data-source='somebody/Tiny-MoE']")
    hand.click("#import-open")
    hand.dashboard.loaded("Tiny-MoE-")
    hand.ask("the hub")
