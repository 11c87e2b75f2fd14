"""Tab System: what the machine has, and the lines of the log, without secrets; stderr has what it had."""

import logging
from typing import Any

import pytest

from app.services import examination, probes
from app.services.host import Host
from app.services.log_lines import MOST, LogLines
from app.services.secret import secret
from app.ui.tabs import system
from tests.app.conftest import page
from tests.logged import Logged

own, other = logging.getLogger("moestro.app"), logging.getLogger("somebody")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])


@pytest.mark.usefixtures("alone")
def test_the_newest_lines_are_kept_and_stderr_has_its_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    lines, hidden = LogLines(), secret("a-secret-of-mine")
    own.warning("before")
    with lines.kept():
        own.info("Auto chose %s", "LFU")
        other.info("nobody asked for this")
        other.warning("the key is %s", str(hidden))
        own.debug("nor for this")
    own.warning("after")
    kept = lines.text().splitlines()
    assert [line.split("  ")[-1].strip() for line in kept] == ["Auto chose LFU", "the key is [hidden]"]
    assert kept[0].split("  ")[1].strip() == "INFO" and kept[1].split("  ")[1].strip() == "WARNING"
    said = capsys.readouterr().err
    assert [word in said for word in ("before", "the key is", "after", "LFU")] == [True, True, True, False]
    assert own.getEffectiveLevel() == logging.WARNING
    with lines.kept():
        for number in range(MOST + 5):
            own.info("line %d", number)
    assert len(lines.text().splitlines()) == MOST and lines.text().endswith(f"line {MOST + 4}")


@pytest.mark.usefixtures("alone")
def test_another_handler_keeps_stderr_to_itself(capsys: pytest.CaptureFixture[str]) -> None:
    lines = LogLines()
    logging.root.handlers.append(logging.NullHandler())
    with lines.kept():
        own.warning("heard")
    assert "heard" in lines.text() and "heard" not in capsys.readouterr().err


@pytest.fixture
def tab(host: Host, monkeypatch: pytest.MonkeyPatch) -> system.SystemTab:
    monkeypatch.setattr(probes.disk, "__defaults__", (2 * probes.MB,))
    monkeypatch.setattr(probes.link, "__defaults__", (2, 2 * probes.MB))
    with page():
        return system.SystemTab(host)


def test_the_machine_is_examined_and_its_problems_stand_first(
    tab: system.SystemTab, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: dict[str, Any] = examination.examine(tab.host.store.folder)
    monkeypatch.setattr(system, "examine", lambda folder: {**found, "problems": ["The <disk> is full."]})
    shown = tab._examine()
    assert shown.index("The &lt;disk&gt; is full.") < shown.index("<table>") and "Problem" not in shown
    for name, text in (("Python", found["python"]), ("Link", found["link"]["kind"]), ("Data", found["data_dir"])):
        assert name in shown and text in shown
    assert "Browser" not in shown, "which only the tests use"


def test_what_goes_wrong_is_told_in_words(
    tab: system.SystemTab, monkeypatch: pytest.MonkeyPatch, caplog: Logged
) -> None:
    monkeypatch.setattr(system, "examine", lambda folder: 1 / 0)
    assert "error inside Moestro" in tab._examine() and "ZeroDivisionError" in caplog.text


def test_the_log_is_shown_as_text(tab: system.SystemTab) -> None:
    assert "Nothing has been logged" in tab.read_log()
    with tab.host.log.kept():
        own.warning("<b>not bold</b>")
    assert "&lt;b&gt;not bold&lt;/b&gt;" in tab.read_log() and 'data-copy-of="#log-lines pre"' in tab.read_log()
