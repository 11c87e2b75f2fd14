"""Tab System: what the machine has, and the lines of the log, without secrets; stderr has what it had."""

import logging
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from app.services import examination, machine_load, probes
from app.services.host import Host
from app.services.log_lines import MOST, LogLines
from app.services.machine_load import MachineWatch, processor_celsius
from app.services.secret import secret
from app.ui.tabs import system
from tests import fake_nvml
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


def test_the_machine_is_examined_with_problems_first(tab: system.SystemTab, monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = examination.examine(tab.host.store.folder)
    monkeypatch.setattr(system, "examine", lambda folder: {**found, "problems": ["The <disk> is full."]})
    shown = tab._examine()
    assert shown.index("The &lt;disk&gt; is full.") < shown.index("<table>") and "Problem" not in shown
    for name, text in (("Python", found["python"]), ("Link", found["link"]["kind"]), ("Data", found["data_dir"])):
        assert name in shown and text in shown
    assert "Browser" not in shown, "which only the tests use"


def test_what_goes_wrong_is_told(tab: system.SystemTab, monkeypatch: pytest.MonkeyPatch, caplog: Logged) -> None:
    monkeypatch.setattr(system, "examine", lambda folder: 1 / 0)
    assert "error inside Moestro" in tab._examine() and "ZeroDivisionError" in caplog.text


def test_the_log_is_shown_as_text(tab: system.SystemTab) -> None:
    assert "Nothing has been logged" in tab.read_log()
    with tab.host.log.kept():
        own.warning("<b>not bold</b>")
    assert "&lt;b&gt;not bold&lt;/b&gt;" in tab.read_log() and 'data-copy-of="#log-lines pre"' in tab.read_log()


def warm(monkeypatch: pytest.MonkeyPatch, **sensors: list[float]) -> None:
    found = {name: [SimpleNamespace(current=one) for one in degrees] for name, degrees in sensors.items()}
    monkeypatch.setattr(psutil, "sensors_temperatures", lambda: found, raising=False)


def test_the_warmest_sensor_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    warm(monkeypatch, nvme=[90.0], coretemp=[51.0, 63.0])
    assert processor_celsius() == 63.0
    warm(monkeypatch, nvme=[90.0])
    assert processor_celsius() is None
    monkeypatch.delattr(psutil, "sensors_temperatures")
    assert processor_celsius() is None, "Windows has none"


def test_gpus_and_what_one_does_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    fake_nvml.with_gpu(monkeypatch)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", lambda handle: SimpleNamespace(gpu=41))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTemperature", refuse)
    assert MachineWatch().now()["gpus"] == ({"percent": 41, "celsius": None},)
    fake_nvml.without_driver(monkeypatch)
    assert MachineWatch().now()["gpus"] == ()


def test_it_is_measured_once_a_second_at_most_over_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, spent = [100.0], iter([(10.0, 10.0), (13.0, 11.0), (13.0, 15.0)])
    monkeypatch.setattr(machine_load, "spent_s", lambda: next(spent))
    monkeypatch.setattr(machine_load, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = MachineWatch()
    assert [watch.now()["cpu_percent"] for _ in range(3)] == [75.0] * 3
    clock[0] += machine_load.EVERY_S
    assert watch.now()["cpu_percent"] == 0.0


def test_busy_and_idle_seconds_are_of_this_machine() -> None:
    busy_s, idle_s = machine_load.spent_s()
    assert busy_s > 0 and idle_s >= 0
