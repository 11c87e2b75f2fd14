"""The whole way with the real engine: a checkpoint is imported in the dashboard, opened, and chatted with from disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.browser.conftest import Open, Server
from tests.checkpoints import make_checkpoint
from tests.tiny_tokenizer import save_tokenizer


@pytest.mark.long(0.6)
def test_a_checkpoint_becomes_a_pack_that_answers_from_disk(open_page: Open, tmp_path: Path) -> None:
    source = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "mine" / "Tiny-MoE"))
    server = Server(tmp_path / "home", MOESTRO_TEST_ENGINE="real")
    try:
        dashboard = open_page(url=server.start().url)
        page = dashboard.page
        page.get_by_role("tab", name="Library").click()
        dashboard.wait_text("#models", "No models found yet")
        page.locator("#import-source").get_by_role("textbox").fill(str(source))
        page.click("#import-format input")
        page.get_by_role("option", name="int8: ").click()
        dashboard.wait_text("#import-forecast", "off by")
        page.click("#import-start")
        page.wait_for_selector("#import-open", state="visible")
        pack = server.home / "packs" / "Tiny-MoE-int8"
        assert (pack / "moestro.json").exists()
        dashboard.wait_text("#models", "Tiny-MoE-int8")
        page.click("#import-open")
        dashboard.loaded("Tiny-MoE-int8")
        dashboard.wait_text("#fit", "read from it")
        dashboard.wait_text("#fit", "Expected")
        assert dashboard.value("#set-format input") == "int8 (fixed by the pack)"
        dashboard.ask("Where do your experts come from?").streaming(40)
        page.wait_for_selector(".deck[data-disk='1'] [data-k=disk]", state="visible")
        dashboard.stop()
        assert "from disk" in dashboard.answers()[-1]
        frame = dashboard.frame()
        assert frame["shape"]["experts"] == 8
        held = frame["shape"]["layers"] * frame["shape"]["experts"] * frame["shape"]["expert_bytes"]
        assert frame["memory"]["host"] < held / 4, "experts wait on disk"
        page.click("#unload")
        dashboard.wait_text("#model-status", "No model loaded")
        page.get_by_role("tab", name="Library").click()
        page.locator("#models tbody", has_text="Tiny-MoE-int8").click()
        page.click("#delete-model")
        page.click("#delete-model-yes")
        dashboard.wait_text("#models", "No models found yet")
        assert not pack.exists()
        server.end()
    finally:
        server.kill()
