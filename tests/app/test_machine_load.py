"""How busy and warm the machine is, as the page is told."""

from types import SimpleNamespace

import psutil
import pynvml
import pytest

from app.services import machine_load
from app.services.machine_load import MachineWatch, processor_celsius
from tests import fake_nvml


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
