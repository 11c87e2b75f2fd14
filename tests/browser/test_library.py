"""The Library tab: what is listed, imported, opened and deleted; an import with the real engine from start to chat."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard
from tests.checkpoints import make_checkpoint
from tests.fake_models import fake_pack
from tests.tiny_tokenizer import save_tokenizer


@pytest.fixture
def shelf(server: Server, tmp_path: Path) -> Iterator[Path]:
    """The packs of the server under test, one of them broken; gone again afterwards. And a folder with a checkpoint."""
    packs = server.home / "packs"
    fake_pack(packs / "Sparse-30B-int4")
    (fake_pack(packs / "Torn") / "experts-00000.bin").write_bytes(b"x")
    model = tmp_path / "mine" / "Mixtral"
    model.mkdir(parents=True)
    (model / "model.safetensors").write_bytes(b"x" * 2_000_000)
    (model / "config.json").write_text(
        json.dumps({"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 32, "dtype": "bfloat16"})
    )
    yield packs
    for pack in sorted(packs.rglob("*"), key=lambda path: -len(path.parts)):
        pack.rmdir() if pack.is_dir() else pack.unlink()


@pytest.fixture
def library(dashboard: Dashboard, shelf: Path) -> Iterator[Dashboard]:
    """The page with its library open; the demo model is loaded again afterwards."""
    open_library(dashboard)
    yield dashboard
    dashboard.rest()
    if dashboard.health()["model"] != "demo":
        dashboard.page.locator("#model input").fill("demo")
        dashboard.page.locator("#model input").press("Enter")
        dashboard.wait_text("#fit", "Fits")
        dashboard.page.click("#load")
        dashboard.loaded("Demo model")


def open_library(dashboard: Dashboard) -> None:
    dashboard.page.get_by_role("tab", name="Library").click()
    dashboard.wait_text("#models", "Sparse-30B-int4")


def row(dashboard: Dashboard, name: str) -> str:
    return str(dashboard.page.locator("#models tbody", has_text=name).first.inner_text())


def pick(dashboard: Dashboard, name: str) -> None:
    dashboard.page.click(f"#models tbody:has-text('{name}')")
    dashboard.wait_text("#model-about h3", name)


@pytest.mark.long(0.2)  # tests/app/test_library.py has the list; below it is used
def test_what_is_there_is_listed_and_what_is_broken_says_why(library: Dashboard, tmp_path: Path) -> None:
    page = library.page
    for text in ("pack", "int4-g64", "4 × 16, top-2", "never"):
        assert text in row(library, "Sparse-30B-int4")
    assert "experts-00000.bin is damaged" in row(library, "Torn")
    box = page.locator("#folders input")
    box.fill(str(tmp_path / "mine"))
    box.press("Enter")
    library.wait_text("#models", "Mixtral")
    for text in ("safetensors", "bfloat16", "2 MB", "32 × 8, top-2"):
        assert text in row(library, "Mixtral")
    page.locator("#models [data-sort=bytes]").click()
    page.wait_for_selector("#models th.bytes[aria-sort=descending]")
    assert "Mixtral" in page.locator("#models tbody").first.inner_text()
    pick(library, "Torn")
    page.wait_for_selector("#open-model", state="hidden")
    pick(library, "Mixtral")
    page.wait_for_selector("#open-model")
    page.wait_for_selector("#delete-model", state="hidden")
    page.click("#import-this")
    page.wait_for_function(
        "path => document.querySelector('#import-source').querySelector('input, textarea').value.endsWith(path)",
        arg="Mixtral",
    )
    page.locator("#folders .token-remove").first.click()
    page.wait_for_function("!document.querySelector('#models').innerText.includes('Mixtral')")


def test_the_list_obeys_the_keyboard(library: Dashboard) -> None:
    page = library.page
    page.locator("#models tbody").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_function("document.querySelectorAll('#models tbody')[1].ariaSelected === 'true'")


@pytest.mark.long(0.3)  # test_jobs.py follows, stops and goes on with a job; tests/app/test_importer.py with an import
def test_an_import_is_shown_cancelled_gone_on_with_and_opened(library: Dashboard, open_page: Open) -> None:
    page = library.page
    page.locator("#import-source").get_by_role("textbox").fill("models/slow-Olmoe")
    page.click("#import-start")
    page.wait_for_function("+document.querySelector('#import-progress [role=progressbar]').ariaValueNow > 5")
    for text in ("Layer 1 of 4", "of 40 MB", "MB/s", "left"):
        library.wait_text("#import-progress", text)
    assert not page.is_visible("#import-start")
    page.reload()
    library.settled()
    library.wait_text("#import-line", "Importing slow-Olmoe")
    library.ask("Do you answer meanwhile?").streaming()
    library.stop()
    other = open_page()
    other.page.get_by_role("tab", name="Library").click()
    other.page.wait_for_selector("#import-progress", state="visible")
    other.page.click("#import-cancel")
    open_library(library)
    page.wait_for_selector("#import-resume", state="visible")
    library.wait_text("#import-alert", "was stopped")
    library.wait_text("#import-alert", "is kept")
    assert "not finished" in row(library, "slow-Olmoe")
    page.click("#import-resume")
    page.wait_for_selector("#import-open", state="visible")
    library.wait_text("#import-alert", "is imported")
    page.click("#import-open")
    library.loaded("slow-Olmoe-int4-g64")
    library.advanced()  # where the card says what stays on disk
    library.wait_text("#fit", "read when needed")
    assert library.value("#model input") == "slow-Olmoe-int4-g64"
    library.ask("And the disk?").streaming(60)
    page.wait_for_selector(".deck[data-disk='1'] [data-k=disk]", state="visible")
    assert "disk" in library.text("[data-k=res-legend]")
    library.stop()
    assert "from disk" in library.answers()[-1]


def test_a_row_that_is_redrawn_between_press_and_release_is_chosen(library: Dashboard) -> None:
    page = library.page
    pick(library, "Torn")
    page.hover("#models tbody:has-text('Sparse-30B-int4')")
    page.mouse.down()
    page.evaluate("document.querySelectorAll('#models tbody').forEach((row) => row.replaceWith(row.cloneNode(true)))")
    page.mouse.up()
    library.wait_text("#model-about h3", "Sparse-30B-int4")


@pytest.mark.long(0.1)
def test_deleting_asks_first_and_refuses_what_is_loaded(library: Dashboard, shelf: Path) -> None:
    page = library.page
    pick(library, "Sparse-30B-int4")
    page.click("#open-model")
    library.loaded("Sparse-30B-int4")
    page.wait_for_function("document.querySelector('#set-format input').value === 'int4-g64 (fixed by the pack)'")
    library.advanced()
    page.wait_for_selector("#set-format input:disabled")
    open_library(library)
    pick(library, "Sparse-30B-int4")
    page.click("#delete-model")
    library.wait_text("#confirm-model", "Sparse-30B-int4")
    library.wait_text("#confirm-model", "This removes 7 files")
    library.wait_text("#confirm-model", "moestro.json")
    page.click("#delete-model-no")
    page.wait_for_selector("#confirm-model", state="hidden")
    (shelf / "Sparse-30B-int4" / "thesis.txt").write_text("mine")
    page.click("#delete-model")
    library.wait_text("#confirm-model", "stays, and the folder with it: thesis.txt")
    page.click("#delete-model-yes")
    library.wait_text("#library-alert", "is in use")
    assert (shelf / "Sparse-30B-int4" / "moestro.json").exists()
    page.click("#unload")
    library.wait_text("#model-status", "No model loaded")
    page.click("#delete-model-yes")
    page.wait_for_function("!document.querySelector('#models').innerText.includes('Sparse-30B-int4')")
    library.wait_text("#library-alert", "free again. Left in the folder: thesis.txt")
    assert [file.name for file in (shelf / "Sparse-30B-int4").iterdir()] == ["thesis.txt"]
    page.wait_for_function("document.querySelector('#model input').value === 'Demo model (bundled)'")
    library.wait_text("#fit", "Fits")


@pytest.mark.long(0.1)  # test_late_answers.py has what was turned since stay; the question itself is above
def test_a_question_stays_when_its_row_is_chosen_once_more(library: Dashboard) -> None:
    """The choice waits until the server has answered what was asked before, and comes after the question."""
    page, held = library.page, list[Any]()
    pick(library, "Sparse-30B-int4")
    page.route("**/gradio_api/run/*", lambda route: route.continue_() if held else held.append(route))
    with page.expect_request("**/gradio_api/run/*"):
        page.click("#library-refresh")
    page.click("#models tbody:has-text('Sparse-30B-int4')")
    page.click("#delete-model")
    library.wait_text("#confirm-model", "This removes")
    with page.expect_response(lambda reply: '"entry"' in (reply.request.post_data or "")) as chosen:
        held.pop().continue_()
        page.unroute("**/gradio_api/run/*")
    assert chosen.value.json()["data"][6] == {"__type__": "update"}, "the question is left as it is"
    page.click("#delete-model-no")
    page.wait_for_selector("#confirm-model", state="hidden")


@pytest.mark.long(0.1)  # tests/app/test_words.py has the tiers of a pack and of a checkpoint
def test_host_memory_is_a_choice_of_packs_alone(library: Dashboard) -> None:
    library.advanced()
    page = library.page
    page.wait_for_selector("#set-host", state="hidden")
    pick(library, "Sparse-30B-int4")
    page.click("#open-model")
    page.wait_for_selector("#set-host", state="visible")
    library.wait_text("#fit", "read when needed")
    box = page.locator("#set-host").get_by_role("textbox")
    box.fill("all")
    box.press("Tab")
    library.wait_text("#fit", "not needed once loaded")


@pytest.mark.long(0.6)
def test_a_checkpoint_becomes_a_pack_that_answers_from_disk(
    open_page: Open, tmp_path: Path, real_server: Server
) -> None:
    source = save_tokenizer(make_checkpoint("qwen3_moe", tmp_path / "mine" / "Tiny-MoE"))
    dashboard = open_page(url=real_server.url)
    page = dashboard.page
    page.get_by_role("tab", name="Library").click()
    dashboard.wait_text("#models", "No models found yet")
    page.locator("#import-source").get_by_role("textbox").fill(str(source))
    page.click("#import-format input")
    page.get_by_role("option", name="int8: ").click()
    dashboard.wait_text("#import-forecast", "off by")
    page.click("#import-start")
    page.wait_for_selector("#import-open", state="visible")
    pack = real_server.home / "packs" / "Tiny-MoE-int8"
    assert (pack / "moestro.json").exists()
    dashboard.wait_text("#models", "Tiny-MoE-int8")
    dashboard.type_in("set-budget-text", "50%")  # Auto would take all; and Advanced says what stays on disk
    page.wait_for_function("document.querySelector('#set-budget input[type=range]').value === '50'")
    page.click("#import-open")
    dashboard.loaded("Tiny-MoE-int8")
    dashboard.wait_text("#fit", "read when needed")
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


@pytest.mark.long(0.1)  # tests/app/test_importer.py has the words; other alerts are in test_sidebar.py
def test_what_cannot_be_imported_is_told(library: Dashboard) -> None:
    page = library.page
    page.locator("#import-source").get_by_role("textbox").fill("")
    library.insist("#import-start", "#import-alert", "Say what to import")
    page.locator("#import-source").get_by_role("textbox").fill("models/broken-model")
    library.insist("#import-start", "#import-alert", "no config.json")
    page.wait_for_selector("#import-start", state="visible")
