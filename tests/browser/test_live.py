"""The live deck: it draws what the engine says, answers mouse and keyboard; and the regret meter on it."""

import json
import urllib.request
from pathlib import Path

import pytest
from PIL import Image

from core.settings.registry import variants
from tests.browser.dashboard import Dashboard

CANVASES = {"residency": "", "tpot": "", "link": "", "pairs": "Co-activation", "layers": "Layers"}  # with their panels


def test_every_panel_draws_and_explains_itself_on_hover(dashboard: Dashboard) -> None:
    dashboard.ask("Draw").streaming(80)
    dashboard.stop()
    for name, panel in CANVASES.items():
        if panel:
            dashboard.panel(panel)
        canvas = dashboard.page.locator(f".deck canvas[data-c={name}]")
        canvas.scroll_into_view_if_needed()
        colours = canvas.evaluate(
            """c => { const image = c.getContext('2d').getImageData(0, 0, c.width, c.height);
            return new Set(new Uint32Array(image.data.buffer)).size; }"""
        )
        assert colours > 3, name
        box = canvas.bounding_box()
        canvas.hover(position={"x": 60, "y": box["height"] / 3})
        dashboard.page.wait_for_selector(".deck-tip", state="visible")
        assert len(dashboard.text(".deck-tip")) > 8
    dashboard.page.mouse.move(2, 2)
    dashboard.page.wait_for_selector(".deck-tip", state="hidden")


def test_the_keyboard_reaches_the_cells_and_picks_a_layer(dashboard: Dashboard) -> None:
    page = dashboard.page
    page.focus(".deck canvas[data-c=residency]")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert dashboard.page.evaluate("document.querySelector('[data-k=say]').textContent").startswith("Layer 1, expert 1")
    page.keyboard.press("Enter")
    assert dashboard.value(".deck select") == "1"
    page.keyboard.press("Escape")
    page.wait_for_selector(".deck-tip", state="hidden")


def test_charts_pause_grow_and_are_saved(dashboard: Dashboard, tmp_path: Path) -> None:
    page = dashboard.page
    dashboard.ask("Look at it").streaming(40)
    page.click(".deck .pause")
    frames, text = dashboard.deck("frames"), dashboard.text("[data-k=tok]")
    dashboard.stop()  # the answer goes on without the charts
    assert (dashboard.deck("frames"), dashboard.text("[data-k=tok]")) == (frames, text)
    canvas = page.locator(".deck canvas[data-c=link]")
    height = canvas.bounding_box()["height"]
    canvas.hover()
    page.click("[aria-label='Enlarge: Link traffic']")
    page.wait_for_function(
        f"(c => c.clientHeight > {2 * height} && c.height >= c.clientHeight)"
        "(document.querySelector('.deck canvas[data-c=link]'))"
    )
    with page.expect_download() as saved:
        page.click("[aria-label='Save as a picture: Link traffic']")
    saved.value.save_as(tmp_path / saved.value.suggested_filename)
    with Image.open(tmp_path / "moestro-link-traffic.png") as image:
        assert image.height > 2 * height and len(image.convert("RGB").getcolors(1 << 20) or ()) > 8
    page.click("[aria-label='Make it smaller: Link traffic']")
    page.wait_for_function(f"document.querySelector('.deck canvas[data-c=link]').clientHeight <= {height + 1}")
    page.click(".deck .pause")
    dashboard.wait_deck("frames", frames)
    page.mouse.move(2, 2)


def test_figures_are_the_engines(dashboard: Dashboard) -> None:
    dashboard.ask("Figures").streaming(80)
    dashboard.stop()
    dashboard.page.wait_for_function("document.querySelector('.deck').dataset.busy === '0'")
    frame = dashboard.frame()
    assert float(dashboard.text("[data-k=tok]")) > 0
    assert abs(float(dashboard.text("[data-k=hit]")) - 100 * frame["hit"]) < 0.1
    assert dashboard.text("[data-k=exact]").lower() == "exact"
    shape = frame["shape"]
    assert f"{shape['layers']} layers × {shape['experts']} experts" in dashboard.text("[data-k=res-text]")


def test_the_time_of_a_token_is_in_parts_that_add_up_beside_the_speed_limit(dashboard: Dashboard) -> None:
    dashboard.ask("Parts").streaming(80)
    dashboard.stop()
    page = dashboard.page
    page.wait_for_function("document.querySelector('[data-k=tpot-text]').textContent.includes('of the speed limit')")
    page.wait_for_function("document.querySelector('.deck').dataset.busy === '0'")
    limit = dashboard.frame()["limit"]
    assert abs(sum(limit["parts_ms"].values()) - limit["total_ms"]) < 1e-6
    items = "[...document.querySelectorAll('[data-k=tpot-legend] [data-part]')]"
    page.wait_for_function(  # the deck draws the last frame a little later than the server has it
        f"""(parts) => {items}.every((item) => {{
            const ms = parseFloat(item.querySelector('b').textContent);
            return Math.abs(ms - parts[item.dataset.part]) < 0.006 + 0.006 * ms;
        }})""",
        arg=limit["parts_ms"],
    )
    shown = set(page.evaluate(f"{items}.map((item) => item.dataset.part)"))
    assert shown == {name for name, ms in limit["parts_ms"].items() if ms >= 5e-4 or name == "computing"}
    page.focus(".deck canvas[data-c=tpot]")
    page.keyboard.press("ArrowLeft")
    assert "ms = computing" in page.evaluate("document.querySelector('[data-k=say]').textContent")
    page.keyboard.press("Escape")


def test_the_deck_says_how_busy_the_machine_is(dashboard: Dashboard) -> None:
    dashboard.page.wait_for_function("/^CPU \\d+ %/.test(document.querySelector('[data-k=load]').innerText)")


def test_an_emulated_link_says_so_beside_the_figure(dashboard: Dashboard) -> None:
    dashboard.advanced()
    dashboard.choose("set-link", "own")
    dashboard.page.wait_for_selector("[data-k=emulated]", state="hidden")
    dashboard.choose("set-link", "emulated")
    dashboard.page.wait_for_selector("[data-k=emulated]", state="visible")
    dashboard.choose("set-link", "own")
    dashboard.page.wait_for_selector("[data-k=emulated]", state="hidden")


def test_the_switch_simulates_pcie_by_the_setting_of_the_link(dashboard: Dashboard) -> None:
    page, box = dashboard.page, "#simulate-pcie input"
    dashboard.choose("set-link", "auto")
    page.wait_for_function(f"document.querySelector('{box}').checked")  # the demo model's
    dashboard.expect_mark(lambda: page.uncheck(box), "link")
    page.wait_for_function("document.querySelector('#set-link input').value === 'own'")
    dashboard.choose("set-link", "emulated")
    page.wait_for_function(f"document.querySelector('{box}').checked")
    page.wait_for_selector("[data-k=emulated]", state="visible")
    page.uncheck(box)
    page.wait_for_selector("[data-k=emulated]", state="hidden")
    dashboard.expect_mark(lambda: page.check(box), "link")
    page.wait_for_function("document.querySelector('#set-link input').value === 'auto'")


def test_the_badge_says_where_exact_is_up_to_rounding(dashboard: Dashboard) -> None:
    said = dashboard.page.evaluate(
        """async () => {
        const { tell } = await import("/ui/exactness.js");
        const short = document.querySelector("[data-k=exact]");
        const badge = document.createElement("em");
        badge.dataset.exactness = "";
        document.body.append(badge);
        const say = (news) => { tell(news); return [badge.textContent, badge.title, short.textContent]; };
        const said = [say({ lossy: false, closeness: 1e-6 }), say({ lossy: true, rate: null }),
          say({ lossy: false, closeness: 0 }), say({ weights: "int8" }), say({ weights: "" }),
          say({ arithmetic: "fast", closeness: null }), say({ weights: "int8", closeness: 0.1,
            distance: { kl: 0.00043, kl_high: 0.00052, tokens: 512, agreed: 500, agreement_low: 0.95,
              agreement_high: 0.98 } }),
          say({ lossy: true, rate: 0.283, of: 600, window: 64 }), say({ lossy: false, rate: null, weights: "",
            arithmetic: "reference", closeness: 0, distance: null, fallback: "it has other layers" }),
          say({ fallback: "" })];
        badge.remove();
        return said; }"""
    )
    words = ["EXACT UP TO ROUNDING", "LOSSY", "EXACT", "EXACT for int8 weights", "EXACT", "EXACT, fast arithmetic"]
    words += ["EXACT for int8 weights, fast arithmetic, KL 0.00043", "LOSSY 28.3 % lately", "EXACT", "EXACT"]
    assert [one[0] for one in said] == words and "int8 weights" in said[3][1]
    short = ["UP TO ROUNDING", *words[1:5], "EXACT, fast", "EXACT for int8 weights, fast", *words[7:]]
    assert [one[2] for one in said] == short
    assert "not measured" in said[5][1] and "the same for 500 of 512 (95 %: 95.0–98.0 %)" in said[6][1]
    assert "KL of 0.00043 nats a token (95 %: up to 0.00052)" in said[6][1]
    assert "The reference arithmetic computes: it has other layers." in said[8][1] and "reference" not in said[9][1]
    assert "for the last 64 passes, 28.3 % of 600 were" in said[7][1], "not of the answer, under which its own share is"
    assert "by no more than 1e-6 of the largest" in said[0][1] and "rounding" not in said[2][1]


def test_link_and_disk_have_one_unit_also_while_a_prompt_is_read(dashboard: Dashboard) -> None:
    said = dashboard.page.evaluate(
        """async () => {
        const { Figures } = await import("/ui/deck/js/figures.js");
        const box = {}, figures = new Figures((key) => (box[key] ??= document.createElement("b")));
        document.createElement("p").append(figures.find("split"));
        const frame = { tpot_ms: 10, tok_s: 100, underway: null, shape: { layers: 6 }, hit: 0.5, window: 1, passes: 2,
          link_gbps: 0.041, link_peak_gbps: 0.3, link_limit_gbps: 20, exact: true, lossy: null, quality: null,
          step: [7, 8], decode: [0, 1], tokens: [300, 1], total_ms: [9, 10], disk_bytes: [9e9, 405e3],
          emulated: false, busy: true,
          limit: { share: null, total_ms: 0, parts_ms: {} } };
        const say = (news) => { figures.kpis({ ...frame, ...news });
          return ["tok-sub", "link", "link-unit", "link-sub", "disk", "disk-unit", "disk-sub"].map((key) =>
            box[key].textContent); };
        return [say({}), say({ disk_bytes: [0, 6e6] }), say({ underway: [2, 300, 3, 3e9, 1e8] })]; }"""
    )
    assert said[0] == ["answering", "41.0", "MB/s", "peak 300 of 20000", "40.5", "MB/s", "405.0 kB/token"]
    assert said[1][1:6] == ["0.041", "GB/s", "peak 0.30 of 20.0", "0.60", "GB/s"]
    assert said[2][:4] == ["prompt, layer 3/6", "1.50", "GB/s", "peak 1.50 of 20.0"]
    assert said[2][4:] == ["0.050", "GB/s", "100.0 MB in this pass"]


def test_answers_to_be_checked_are_counted_and_followed(dashboard: Dashboard) -> None:
    said = dashboard.page.evaluate(
        """async () => {
        const { waiting } = await import("/ui/deck/js/quality.js");
        return [[0, 0, false], [1, 0.254, false], [2, 0.5, false], [2, 0, true]].map(([count, share, busy]) =>
            waiting({ busy, unscored: [count, share] })); }"""
    )
    assert said == [
        "",
        "Checking 1 answer: 25 %",
        "Checking 2 answers, the first: 50 %",
        "2 answers to be checked once the model is idle",
    ]
    with urllib.request.urlopen(f"{dashboard.url}/live/state", timeout=30) as reply:
        assert json.load(reply)["host"]["unscored"][0] == 0


def test_what_prefetching_is_worth_is_said_once_something_was_prefetched(dashboard: Dashboard) -> None:
    said = dashboard.page.evaluate(
        """async () => {
        const { Figures } = await import("/ui/deck/js/figures.js");
        const box = {}, figures = new Figures((key) => (box[key] ??= document.createElement("b")));
        const say = (prefetched, net_ms, compared = null) => {
          figures.ahead({ prefetched, net_ms, compared }); return [box.ahead.hidden, box.ahead.textContent]; };
        return [say([0, 0, 0, 0], 0), say([5, 1, 2, 1], 0.5), say([5, 1, 2, 0], -1.25),
          say([0, 0, 0, 0], 0, [12.5, 10, 8, false]), say([5, 1, 2, 0], 3, [8, 10, 16, true])]; }"""
    )
    assert said[0][0] and not said[1][0]
    assert said[1][1] == "Prefetched: 5 in time, 1 late, 2 wasted (1 evicted unused) · saves at most 0.50 ms a token"
    assert "makes each token 1.25 ms slower" in said[2][1] and "evicted" not in said[2][1]
    paused = "Prefetching is paused: 12.5 ms a token with it, 10.0 without (8 tokens each)"
    assert said[3] == [False, paused] and "Prefetched: 5 in time" in said[4][1]
    assert "Prefetching pays: 8.00 ms a token with it, 10.0 without" in said[4][1] and "at most" not in said[4][1]


def test_a_metric_with_a_label_is_named_beside_the_pass(dashboard: Dashboard) -> None:
    """As the frame lists it: no panel needs to know the metric."""
    said = dashboard.page.evaluate(
        """async () => {
        const { TokenTime } = await import("/ui/deck/js/limit.js"), { decode } = await import("/ui/deck/js/wire.js");
        const names = ["step", "hits", "requests", "heat"];
        const arrays = names.map((name, i) => ({ name, dtype: "float32", shape: [1], offset: 4 * i }));
        Object.assign(arrays[3], { label: "warm", unit: "K" });
        const head = JSON.stringify({ arrays }), text = new TextEncoder().encode(head + " ".repeat(-head.length & 3));
        const frame = new Uint8Array(4 + text.length + 4 * names.length);
        new DataView(frame.buffer).setUint32(0, text.length, true);
        frame.set(text, 4);
        frame.set(new Uint8Array(new Float32Array([9, 1, 2, 4.5]).buffer), 4 + text.length);
        const line = new TokenTime(document.createElement("canvas"), () => ({}));
        line.frame = { ...decode(frame.buffer), limit: { names: ["computing", "regret"], by_pass: [6, 3] } };
        return line.lines(0); }"""
    )
    assert said[0] == "9.00 ms = computing 6.00 + policy 3.00"
    assert said[1:] == ["1 of 2 requests hit", "warm 4.50 K"]


STATE = "document.querySelector('.deck').dataset.regret"


def _state(dashboard: Dashboard, wanted: str) -> None:
    dashboard.page.wait_for_function(f"{STATE} === '{wanted}'")


@pytest.mark.long(0.1)
def test_it_compares_while_chatting_and_one_click_applies_the_best(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.choose("set-eviction", "None (on demand)")  # whatever else is better ...
    dashboard.choose("set-predictor", "Previous token")  # ... without what prefetching adds
    dashboard.panel("Policies")
    dashboard.ask("Compare").streaming(20)
    _state(dashboard, "ready")
    told = dashboard.text("[data-k=regret-text]")
    assert told.startswith("None (on demand) ")
    for part in ("(0 % without prefetching)", "highest other: ", "Belady (forced admission) ", " tokens"):
        assert part in told
    canvas = page.locator(".deck canvas[data-c=regret]")
    canvas.scroll_into_view_if_needed()
    colours = canvas.evaluate(
        """c => { const image = c.getContext('2d').getImageData(0, 0, c.width, c.height);
        return new Set(new Uint32Array(image.data.buffer)).size; }"""
    )
    assert colours > 3
    canvas.hover(position={"x": 60, "y": 28})
    page.wait_for_function(  # which is best may change with every token
        "titles => titles.some((t) => document.querySelector('.deck-tip')?.innerText.includes(`% ${t}`))",
        arg=[one.title for one in variants("eviction") if one.name != "none"],
    )
    page.mouse.move(2, 2)
    canvas.focus()
    page.keyboard.press("ArrowDown")
    assert "chosen" in page.evaluate("document.querySelector('[data-k=say]').textContent")
    page.keyboard.press("Escape")
    page.wait_for_selector("[data-k=regret-use]", state="visible")
    advised = page.evaluate(  # in one moment: what it advises may be another policy in the next
        """() => { const button = document.querySelector('[data-k=regret-use]'), { textContent } = button;
        button.click(); return textContent.replace('Use ', ''); }"""
    )
    page.wait_for_function("([t]) => document.querySelector('#set-eviction input').value === t", arg=[advised])
    page.wait_for_function(
        "([t]) => document.querySelector('[data-k=regret-text]').textContent.startsWith(t)", arg=[advised]
    )
    dashboard.stop()
    assert any(text.startswith("eviction none") for text in dashboard.marks())
    dashboard.choose("set-eviction", "LRU")
    dashboard.choose("set-predictor", "None")


@pytest.mark.long(0.1)
def test_the_switch_removes_it_and_brings_it_back(dashboard: Dashboard) -> None:
    page = dashboard.page
    dashboard.panel("Policies")
    page.wait_for_selector("[data-k=regret]", state="visible")
    dashboard.advanced()
    page.locator("#set-regret input").uncheck()
    _state(dashboard, "off")
    page.wait_for_selector("[data-k=regret]", state="hidden")
    page.wait_for_selector("canvas[data-c=pairs]", state="visible")  # another panel has its place
    dashboard.ask("Without").streaming(20)
    dashboard.stop()
    assert dashboard.frame()["regret"] is None
    page.locator("#set-regret input").check()
    page.wait_for_selector("[data-k=regret]", state="visible")
    dashboard.ask("With").streaming(20)
    _state(dashboard, "ready")
    dashboard.stop()
