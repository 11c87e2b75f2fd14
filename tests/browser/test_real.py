"""With the real engine: a chat's routing through every policy, plans used and taken back, split experts, late knobs."""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import FITS, Dashboard
from tests.browser.test_jobs import only

pytestmark = pytest.mark.long  # of the real engine in a browser, only an import and its chat guard every change


def test_a_plan_is_used_and_undone(open_page: Open, real_server: Server) -> None:
    dashboard = open_page(url=real_server.url)
    page = dashboard.page
    dashboard.advanced()
    page.locator("#fit-target input").fill("1000")
    page.press("#fit-target input", "Enter")
    dashboard.wait_text("#fit-needed", "There are no hit curves and times of this model yet")
    page.click("#fit-needed [data-open='tab-calibrate']")
    dashboard.wait_text("#calibration-empty", "Not calibrated yet")
    only(dashboard, "Activations", "Hit curves", "Measured times")
    page.locator("#calibration-limit input").fill("600")
    page.click("#calibration-go")
    dashboard.wait_text("#calibration-head", "Profile of Demo model")
    page.locator("#fit-target input").fill("999")
    page.press("#fit-target input", "Enter")
    dashboard.wait_text("#fit-needed", "For 999 ms per token: at least")
    page.click("#plan-go")
    dashboard.wait_text("#plan-said", "Hit curves from calibration")
    assert not page.is_visible("#plan-undo")
    page.click("#plan-use")
    dashboard.wait_text("#plan-said", "Measured waiting a token")
    page.wait_for_selector("#plan-use", state="hidden")
    page.wait_for_function("document.querySelector('#set-layer_slots input').value.includes('plan')")
    page.click("#plan-undo")
    page.wait_for_selector("#plan-undo", state="hidden")
    page.wait_for_function("!document.querySelector('#set-layer_slots input').value.includes('plan')")
    with page.expect_response("**/run/predict*"):
        page.get_by_label("Plan again while idle").check()
    dashboard.goto()
    page.get_by_role("tab", name="Calibrate").click()
    page.wait_for_function("document.querySelector('#plan-idle input')?.checked")


COUNTED = "document.querySelector('[data-k=res-legend] li:has(.part)').innerText.replace(/\\D/g, '') > 0"


def test_theta_moves_mid_answer_and_a_plan_is_used_and_undone(open_page: Open, real_server: Server) -> None:
    dashboard = open_page(url=real_server.url)
    page = dashboard.page
    dashboard.advanced()
    assert not page.is_visible("#set-split"), "whole experts cannot be kept in part"
    dashboard.type_in("set-blocks", "5")
    dashboard.wait_text("#fit", "cannot be cut into 5 equal blocks")
    dashboard.type_in("set-blocks", "3")
    dashboard.wait_text("#fit", "Fits")
    dashboard.load()
    page.wait_for_selector("#set-split", state="visible")
    dashboard.ask("Count as far as you can.").streaming()
    dashboard.expect_mark(lambda: dashboard.choose("set-split", "The same part"), "split")
    page.wait_for_function(COUNTED)  # the map's legend counts experts that are there in part
    dashboard.expect_mark(lambda: dashboard.slide("set-split-uniform-theta", 0.3), "split.uniform.theta")
    before = len(dashboard.tail())
    page.wait_for_function("(before) => document.querySelector('.tail').innerText.length > before + 40", arg=before)
    dashboard.stop()
    page.get_by_role("tab", name="Calibrate").click()
    dashboard.wait_text("#calibration-empty", "Not calibrated yet")
    only(dashboard, "Activations", "Hit curves", "Measured times")
    page.locator("#calibration-limit input").fill("600")
    page.click("#calibration-go")
    dashboard.wait_text("#calibration-head", "Profile of Demo model")
    page.click("#plan-go")
    page.wait_for_selector("#plan-figure .plot-container .main-svg")
    dashboard.wait_text("#plan-said", "Predicted by MoEpic's latency model")
    dashboard.wait_text("#plan-said", "Even, halves")
    page.click("#plan-use")
    dashboard.wait_text("#plan-said", "Measured waiting a token")
    page.wait_for_function("document.querySelector('#set-split input').value.includes('plan')")
    page.get_by_role("tab", name="Chat + Live").click()
    dashboard.ask("What does print do, in 30 words?").answered()
    page.get_by_role("tab", name="Calibrate").click()
    page.click("#plan-undo")
    page.wait_for_selector("#plan-undo", state="hidden")
    page.wait_for_function("document.querySelector('#set-split input').value === 'The same part'")


SLOWEST = """() => { const range = document.querySelector('#set-link_gbps input[type=range]');
    range.value = range.min; range.dispatchEvent(new Event('input', {bubbles: true})); }"""


@pytest.mark.long(0.5)
def test_a_knob_turned_while_a_prompt_is_read_is_not_lost(open_page: Open, real_server: Server) -> None:
    dashboard = open_page(url=real_server.url)
    page = dashboard.page
    dashboard.advanced()
    dashboard.choose("set-link", "emulated")
    page.wait_for_selector("#set-link_gbps", state="visible")
    page.evaluate(SLOWEST)
    dashboard.ask("Which of them is used? " * 20)
    dashboard.wait_text(".tail", "Reading the prompt")
    bypass = page.locator("#set-bypass input")
    before = bypass.is_checked()
    dashboard.reach("set-bypass")
    bypass.click()
    page.wait_for_function("document.querySelector('.tail').innerText.includes('Reading the prompt')")
    dashboard.stop()
    assert bypass.is_checked() != before
    dashboard.choose("set-link", "auto")
    dashboard.ask("Hello").streaming()
    assert any(mark.startswith("bypass") for mark in dashboard.marks()), dashboard.marks()
    assert bypass.is_checked() != before


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, really loaded."""
    with Server(tmp_path_factory.mktemp("real"), MOESTRO_TEST_ENGINE="real").running() as server:
        yield server


def analysis(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.wait_for_selector("#whatif-go:visible, #whatif-cancel:visible")  # the one hides the other
    return dashboard


def test_every_policy_on_a_chat_s_own_tokens(open_page: Open, real: Server, tmp_path: Path) -> None:
    dashboard = open_page(url=real.url)
    page = dashboard.page
    for name in ("print", "os.path.join", "sorted", "the json module"):
        dashboard.ask(f"What does {name} do, in 60 words?").answered()
    analysis(dashboard)
    dashboard.wait_text("#whatif-empty", "Nothing compared yet")
    page.click("#whatif-go")
    page.wait_for_selector("#whatif-table tbody tr.bound")
    policies = [text.strip() for text in page.locator("#whatif-table td.policy").all_inner_texts()]
    assert {
        "LRU",
        "LFU",
        "Belady (forced admission)",
        "Belady with bypass",
        "Perfect prefetch, same link",
        "Everything resident",
    } <= set(policies)
    for figure in ("hits", "tpot", "bars"):
        page.wait_for_selector(f"#whatif-{figure} .plot-container .main-svg")
    head = dashboard.text("#whatif-head")
    assert "SIMULATED" in head.upper()
    assert "link" in head
    with page.expect_download() as download:
        page.click("#whatif-csv")
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert {"lru", "lfu", "fifo"} <= {row["policy"] for row in rows}
    assert all(0 <= float(row["hit_rate"]) <= float(row["belady_hit_rate"]) + 1e-9 for row in rows)
    page.locator("#whatif-table th.hit button").click()
    best = page.locator("#whatif-table td.hit").first.inner_text()
    assert best == "100.0 %", "everything resident comes first now"
    page.reload()
    analysis(dashboard.settled())
    page.wait_for_selector("#whatif-table tbody tr.bound")
    other = analysis(open_page(url=real.url, width=390, height=844, scheme="light"))
    other.page.wait_for_selector("#whatif-table tbody tr.bound")
    assert other.page.evaluate(FITS)


def test_prefetchers_are_tested_and_a_run_is_cancelled(open_page: Open, real: Server, tmp_path: Path) -> None:
    layers, tokens, experts, k = 8, 12_000, 64, 6
    random = np.random.default_rng(0)
    path = tmp_path / "long.npz"
    chosen = random.random((layers, tokens, experts), np.float32).argpartition(k, 2)[..., :k]
    np.savez(path, experts=chosen.astype(np.uint8))
    dashboard = analysis(open_page(url=real.url))
    page = dashboard.page
    page.locator("#whatif-clock button").first.click()
    page.click("#whatif-source input")
    page.get_by_role("option", name="A trace file").click()
    page.locator("#whatif-path").get_by_role("textbox").fill(str(tmp_path / "gone.npz"))
    page.click("#whatif-go")
    dashboard.wait_text("#analysis-alert", "There is no file")
    page.locator("#whatif-path").get_by_role("textbox").fill(str(path))
    page.locator("#whatif-limit input").fill("0")
    for field, value in (("compute", "10"), ("load", "1")):
        page.locator(f"#whatif-{field} input").fill(value)
        page.locator(f"#whatif-{field} input").press("Tab")
    dashboard.choose("whatif-predictors", "All of the next layer")  # copy by copy: it would take minutes
    page.keyboard.press("Escape")
    page.click("#whatif-go")
    page.wait_for_selector("#analysis-progress", state="visible")
    other = analysis(open_page(url=real.url))
    other.page.wait_for_selector("#whatif-cancel", state="visible")
    dashboard.page.click("#whatif-cancel")
    dashboard.wait_text("#analysis-alert", "Cancelled")
    page.wait_for_selector("#whatif-go", state="visible")
    assert not list(real.home.glob("analysis/*")), "a copy of the trace stayed behind"
    page.locator("#whatif-limit input").fill("200")
    page.click("#lab-go")
    page.wait_for_selector("#lab-table tbody tr")
    dashboard.wait_text("#lab-table", "Oracle")
    dashboard.wait_text("#lab-table", "hidden states")
    page.wait_for_selector("#lab-recall .plot-container .main-svg")
    with page.expect_download() as download:
        page.click("#lab-csv")
    assert "recent,all," in Path(download.value.path()).read_text(encoding="utf-8")
