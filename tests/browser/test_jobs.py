"""Jobs on the page: a calibration, a batch, modes beside each other, one question under two settings; bench results."""

import csv
import json
from pathlib import Path

import pytest

from tests.bench.systems_result import systems_result
from tests.browser.conftest import Open, Server
from tests.browser.dashboard import FITS, Dashboard
from tests.browser.test_looks import CUT


def only(dashboard: Dashboard, *parts: str) -> None:
    """Tick these parts alone."""
    page = dashboard.page
    boxes = page.locator("#calibration-parts label")
    for at in range(boxes.count()):
        box = boxes.nth(at)
        wanted = any(box.inner_text().strip().startswith(part) for part in parts)
        box.locator("input").set_checked(wanted)


def slid(dashboard: Dashboard, element: str, value: float) -> None:
    """Drag a slider and let it go."""
    dashboard.slide(element, value)
    dashboard.page.evaluate(
        "id => document.querySelector(`#${id} input[type=range]`).dispatchEvent("
        "new Event('pointerup', {bubbles: true}))",
        element,
    )


@pytest.mark.long
def test_a_calibration_ends_with_a_summary_and_opens_what_needs_it(open_page: Open, real_server: Server) -> None:
    dashboard = open_page(url=real_server.url)
    page = dashboard.page
    page.get_by_role("tab", name="Calibrate").click()
    dashboard.wait_text("#calibration-empty", "Not calibrated yet")
    only(
        dashboard,
        "Activations",
        "Co-activations",
        "Alike experts",
        "Default vectors",
        "Next-layer gate",
        "Gate entropy",
    )
    page.locator("#calibration-limit input").fill("0")
    page.click("#calibration-go")
    page.wait_for_selector("#calibration-progress", state="visible")
    page.click("#calibration-cancel")
    dashboard.wait_text("#calibration-alert", "Cancelled")
    assert not list(real_server.home.glob("profiles/*"))
    page.locator("#calibration-limit input").fill("600")
    page.click("#calibration-go")
    dashboard.wait_text("#calibration-head", "Profile of Demo model")
    dashboard.wait_text("#calibration-head", "tokens of the bundled prompts")
    for figure in ("counts", "pairs", "similarity", "entropy", "recall"):
        page.wait_for_selector(f"#profile-{figure} .plot-container .main-svg")
    slid(dashboard, "profile-layer", 2)
    for figure in ("pairs", "similarity"):
        dashboard.wait_text(f"#profile-{figure}", "layer 2")
    dashboard.choose("profile-measure", "Share of co-activations")
    dashboard.wait_text("#profile-similarity", "Share of co-activations in layer 2")
    assert len(list(real_server.home.glob("profiles/*.safetensors"))) == 1
    dashboard.choose("set-predictor", "Default vectors")
    page.wait_for_function("document.querySelector('#set-predictor input').value === 'Default vectors'")
    page.get_by_role("tab", name="Chat + Live").click()
    dashboard.ask("What does print do, in 40 words?").answered()
    page.get_by_role("tab", name="Calibrate").click()
    page.click("#profile-delete")
    page.wait_for_selector("#profile-confirm")
    page.click("#profile-delete-yes")
    page.wait_for_selector("#calibration-alert .notice.error")
    assert len(list(real_server.home.glob("profiles/*.safetensors"))) == 1, "what is chosen needs it"
    dashboard.choose("set-predictor", "None")
    page.wait_for_function("document.querySelector('#set-predictor input').value === 'None'")
    page.click("#profile-delete")
    page.click("#profile-delete-yes")
    dashboard.wait_text("#calibration-empty", "Not calibrated yet")
    assert not list(real_server.home.glob("profiles/*.safetensors"))
    assert page.evaluate(FITS)


def test_how_long_it_may_take_stands_there_before_a_calibration(dashboard: Dashboard) -> None:
    dashboard.page.get_by_role("tab", name="Calibrate").click()
    dashboard.wait_text("#calibration-rough", "tokens to read")


LINES = 8


def batch(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Batch").click()
    dashboard.page.wait_for_selector("#batch-go:visible, #batch-cancel:visible")
    return dashboard


def test_answered_followed_stopped_and_gone_on_with(dashboard: Dashboard, server: Server, tmp_path: Path) -> None:
    """Lines that give no length are as long as the sidebar says: without end in the first run, short in the second."""
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"say {n}", "id": f"line {n}", **({"max_tokens": 3} if n < 3 else {})} for n in range(LINES)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + "no json\n", "utf-8")
    batch(dashboard)
    page = dashboard.page
    dashboard.wait_text("#batch-empty", "No batch yet")
    page.click("#batch-go")
    dashboard.wait_text("#batch-alert", "Drop a file of prompts")
    page.set_input_files("#batch-upload input[type=file]", file)
    dashboard.wait_text("#batch-upload", "prompts")
    page.locator("#batch-how .label-wrap").click()
    page.locator("#batch-at-once").get_by_role("spinbutton").fill("4")
    page.click("#batch-go")
    page.wait_for_selector("#batch-cancel", state="visible")
    dashboard.wait_text("#batch-cards", f"of {LINES + 1}")
    dashboard.wait_text("#batch-latest", "line ")
    page.get_by_role("tab", name="Chat + Live").click()
    page.fill("#message textarea", "Hello")
    page.press("#message textarea", "Enter")
    page.wait_for_selector("text=The model is being used for a batch")
    batch(dashboard).page.click("#batch-cancel")
    dashboard.wait_text("#batch-progress", "topping after those being written")
    page.click("#batch-cancel")
    dashboard.wait_text("#batch-alert", "Stopped")
    page.get_by_role("tab", name="Chat + Live").click()
    page.wait_for_selector("text=The model is being used for a batch", state="hidden")  # as it is not any more
    batch(dashboard)
    (out,) = server.home.glob("batches/prompts-*.answers.jsonl")
    before = {one["id"] for one in map(json.loads, out.read_text("utf-8").splitlines())}
    assert "line 0" in before and len(before) < LINES
    longest = dashboard.value("#set-sampling-max_new_tokens input")
    dashboard.limit_answers("3")
    page.click("#batch-go")
    dashboard.wait_text("#batch-cards", "were answered before")
    dashboard.wait_text("#batch-cards", f"{LINES + 1} of {LINES + 1}")
    dashboard.wait_text("#batch-cards", "Experts a layer")
    dashboard.limit_answers(longest)
    page.wait_for_selector("#batch-plot .plot-container .main-svg")
    with page.expect_download() as download:
        page.click("#batch-answers")
    assert download.value.suggested_filename == out.name
    found = [json.loads(one) for one in Path(download.value.path()).read_text("utf-8").splitlines()]
    assert len(found) == LINES + 1 == len({one["id"] for one in found})
    assert [one["id"] for one in found if "error" in one] == [f"line-{LINES + 1}"]
    for width, height in ((390, 844), (1366, 768)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate(FITS), width
        # Gradio lays a file's name out anew after this, and measures its tabs in a copy that nobody sees
        page.wait_for_function(f"""() => !{CUT}.some((one) => !one.includes('role="tab"'))""")


@pytest.mark.long(0.3)  # tests/app/test_system_tab.py has what it shows
def test_the_machine_and_the_log_can_be_read_and_copied(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.get_by_role("tab", name="System").click()
    page.wait_for_selector("#log-lines p, #log-lines pre")
    page.click("#examine")
    dashboard.wait_text("#examined", "Memory")
    page.click("#examined [data-copy-of]")
    page.wait_for_function("document.querySelector('#examined [data-copy-of]').textContent === 'Copied'")
    page.get_by_role("tab", name="Chat + Live").click()


def quality(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.get_by_role("tab", name="Quality").click()
    dashboard.page.wait_for_selector("#evaluation-go:visible, #evaluation-cancel:visible")
    return dashboard


def modes_alone(dashboard: Dashboard, *titles: str) -> None:
    """Choose these modes alone."""
    page = dashboard.page
    page.locator("#evaluation-modes .remove-all").click()
    for title in titles:
        page.locator("#evaluation-modes input").fill(title)
        page.get_by_role("option", name=title, exact=True).click()
    page.keyboard.press("Escape")


@pytest.mark.long(0.3)  # tests/app/test_measurements.py and test_quality.py guard what it shows
def test_modes_beside_each_other_and_a_cancel(dashboard: Dashboard, open_page: Open) -> None:
    quality(dashboard)
    page = dashboard.page
    dashboard.wait_text("#evaluation-empty", "Nothing evaluated yet")
    page.locator("#evaluation-residencies").get_by_role("textbox").fill("2")
    page.click("#evaluation-go")
    dashboard.wait_text("#evaluation-alert", "not a share of the experts")
    page.locator("#evaluation-residencies").get_by_role("textbox").fill(".5")
    modes_alone(dashboard, "Exact", "Verify: default vectors")
    page.click("#evaluation-go")
    page.wait_for_selector("#evaluation-cancel", state="visible")
    page.wait_for_selector("#evaluation-table tbody tr")  # measured before it stands still
    dashboard.wait_text("#evaluation-head", "Not all modes")
    other = quality(open_page())
    other.page.wait_for_selector("#evaluation-cancel", state="visible")
    other.page.get_by_role("tab", name="Chat + Live").click()
    other.page.fill("#message textarea", "Hello")
    other.page.press("#message textarea", "Enter")
    other.page.wait_for_selector("text=The model is being evaluated")
    dashboard.page.click("#evaluation-cancel")
    dashboard.wait_text("#evaluation-alert", "Cancelled")
    modes_alone(dashboard, "Exact", "Drop")
    page.click("#evaluation-go")
    page.wait_for_function("document.querySelectorAll('#evaluation-table tbody tr').length === 2")
    page.wait_for_selector("#evaluation-plot .plot-container .main-svg")
    with page.expect_download() as download:
        page.click("#evaluation-csv")
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [row["mode"] for row in rows] == ["exact", "drop"]
    quality(other).page.wait_for_selector("#evaluation-table tbody tr")
    for width, height in ((390, 844), (1366, 768)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate(FITS), width


def beside(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.get_by_role("tab", name="A beside B").click()
    dashboard.page.wait_for_selector("#beside-go:visible, #beside-cancel:visible")
    return dashboard


def test_one_question_under_two_settings(dashboard: Dashboard) -> None:
    page = beside(dashboard).page
    dashboard.wait_text("#beside-empty", "Nothing compared yet")
    page.fill("#beside-question textarea", " ")
    page.click("#beside-go")
    dashboard.wait_text("#beside-alert", "Type a question")
    page.fill("#beside-question textarea", "Wait")
    page.click("#beside-go")
    dashboard.wait_text("#beside-progress", "Round 1 of 3: A")
    page.click("#beside-cancel")
    dashboard.wait_text("#beside-alert", "Cancelled")
    page.click("#beside-keep")
    page.locator("#beside-a input").click()
    page.get_by_role("option", name="Kept settings", exact=True).click()
    page.fill("#beside-question textarea", "Which city?")
    page.click("#beside-go")
    dashboard.wait_text("#beside-head", "A is faster")
    page.wait_for_selector("#beside-plot .plot-container .main-svg")
    dashboard.wait_text("#beside-table", "Time to the first token")
    with page.expect_download() as download:
        page.click("#beside-csv")
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[-1] == "96,2.0,3.0"
    for width, height in ((390, 844), (1366, 768)):
        page.set_viewport_size({"width": width, "height": height})
        assert page.evaluate(FITS), width


FILE = "systems-20260102-030405.json"


def systems(dashboard: Dashboard) -> Dashboard:
    dashboard.page.get_by_role("tab", name="Analysis").click()
    dashboard.page.get_by_role("tab", name="Systems").click()
    return dashboard


@pytest.mark.long(0.3)
def test_the_newest_result_is_drawn_with_what_none_can_beat(open_page: Open, server: Server) -> None:
    result, results = systems_result(), server.home / "results"
    results.mkdir()
    try:
        dashboard = systems(open_page())
        dashboard.wait_text("#systems-empty", "No systems measured yet")
        assert "python launch.py bench systems" in dashboard.text("#systems-empty")
        assert not dashboard.page.is_visible("#systems-tpot")
        (results / FILE).write_text(json.dumps(result), encoding="utf-8")
        (results / FILE.replace("030405", "030406")).write_text(json.dumps({**result, "small": True}), encoding="utf-8")
        for scheme, width in (("dark", 1366), ("light", 390)):
            dashboard = systems(open_page(scheme=scheme, width=width, height=844))
            page = dashboard.page
            dashboard.wait_text("#systems-head", FILE)
            assert "12 tokens, 1 rounds" in dashboard.text("#systems-head")
            page.wait_for_selector("#systems-tpot .plot-container .main-svg")
            for name in ("FineMoE", "BuddyMoE (changes answers)"):
                dashboard.wait_text("#systems-tpot", name)
            assert page.locator("#systems-tpot .scatterlayer .trace").count() >= len(result["systems"]) + 1
            assert not page.is_visible("#systems-empty")
            assert page.evaluate(FITS)
    finally:
        for file in results.iterdir():
            file.unlink()
        results.rmdir()
