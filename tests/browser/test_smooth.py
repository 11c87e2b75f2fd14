"""How the page and its server keep still, measured on an idle machine: while tokens stream, no task of the page's own
thread takes more than 100 ms; a server that no page looks at uses less than 2 % of a core. Both are printed.
"""

import time

import psutil
import pytest

from tests.browser.conftest import Open, Server
from tests.browser.dashboard import Dashboard
from tests.browser.lengths import say

LONGEST_MS, IDLE_SHARE, IDLE_S = 100, 0.02, 20.0
WATCH = """() => { window.tasks = [];
    new PerformanceObserver((list) => tasks.push(...list.getEntries().map((one) => one.duration)))
        .observe({ type: 'longtask' }); }"""
PLANTED = "setTimeout(() => { const from = performance.now(); while (performance.now() - from < 150); })"
# much of everything that is drawn while it grows: lists, tables, code and formulas
TEXT = "\n\n".join(
    f"## Part {part}\n\nSome *words* with `code`, **more** and $x_{part}^2$:\n\n- one\n- two\n\n| a | b |\n|---|---|\n"
    f"| {part} | 2 |\n\n```python\nfor i in range({part}):\n    print(i)  # {part}\n```\n\n$$\\sum_{{i=0}}^{part} i$$"
    for part in range(40)
)


def told(dashboard: Dashboard, what: str, capsys: pytest.CaptureFixture[str]) -> float:
    tasks = sorted(dashboard.page.evaluate("tasks"))
    with capsys.disabled():
        print(f"\n{what}: {len(tasks)} tasks over 50 ms, the longest {max(tasks, default=0.0):.0f} ms")
    return max(tasks, default=0.0)


@pytest.mark.long(1)
def test_no_task_of_the_page_is_long_while_tokens_stream(open_page: Open, capsys: pytest.CaptureFixture[str]) -> None:
    dashboard = open_page()
    dashboard.ask("Warm up, in 20 words").answered()
    dashboard.page.evaluate(WATCH)
    dashboard.ask("Write on").streaming(6000)
    dashboard.stop()
    plain = told(dashboard, "plain text", capsys)
    dashboard.ask(say(TEXT)).answered()
    assert max(plain, told(dashboard, "and Markdown", capsys)) <= LONGEST_MS
    dashboard.page.evaluate(PLANTED)
    dashboard.page.wait_for_function("tasks.some((ms) => ms >= 150)")  # or nothing was watched


@pytest.mark.long(1)
def test_a_server_without_a_page_hardly_works(real_server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    one = psutil.Process(real_server.process.pid)
    time.sleep(5)  # what begins with it
    before = sum(one.cpu_times()[:2])
    time.sleep(IDLE_S)
    share = (sum(one.cpu_times()[:2]) - before) / IDLE_S
    with capsys.disabled():
        print(f"\nidle: {100 * share:.2f} % of a core")
    assert share < IDLE_SHARE
