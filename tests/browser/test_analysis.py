"""Analysis with the real engine: a chat's routing through every policy; a second tab and a reload see the same."""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import FITS, Dashboard

pytestmark = pytest.mark.long  # of the real engine in a browser, only an import and its chat guard every change


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model, really loaded."""
    server = Server(tmp_path_factory.mktemp("real"), MOESTRO_TEST_ENGINE="real")
    try:
        yield server.start()
        server.end()
    finally:
        server.kill()


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
