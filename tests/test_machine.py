"""What the driver of a GPU tells, and that a machine without one is described all the same."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from strop import machine
from strop.machine import Gpu


class Driver:
    """NVIDIA's, of a machine with two GPUs."""

    GPUS = ((b"NVIDIA RTX 4090", (8, 9)), (b"NVIDIA RTX 5090", (12, 0)))

    def __init__(self, failing: str = "") -> None:
        self.failing = failing

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name == self.failing:
            return lambda *_: 100
        return super().__getattribute__(name)

    def cuInit(self, flags: int) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.GPUS)
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 7 - index  # a handle, not the index
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: Any) -> int:
        name.value = self.GPUS[7 - device.value][0][: size - 1]
        return 0

    def cuDeviceGetAttribute(self, number: Any, attribute: int, device: Any) -> int:
        number._obj.value = self.GPUS[7 - device.value][1][{75: 0, 76: 1}[attribute]]
        return 0


def test_gpus_are_those_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert machine.gpus() == [Gpu("NVIDIA RTX 4090", "8.9"), Gpu("NVIDIA RTX 5090", "12.0")]
    assert machine.describe_machine()["gpus"] == ["NVIDIA RTX 4090 of 8.9", "NVIDIA RTX 5090 of 12.0"]


def test_speed_on_a_gpu_is_of_that_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    assert machine.processors("cuda")["gpu"] == "NVIDIA RTX 4090 of 8.9"
    assert machine.processors("cpu").keys() == {"cpu", "isa"}


@pytest.mark.parametrize("call", ["cuInit", "cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetAttribute"])
def test_a_driver_that_fails_shows_no_gpu(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(call))
    assert machine.gpus() == []


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "CUDA_DRIVER", "libnothing.so.9")
    assert machine.gpus() == []
    assert "gpus" not in machine.describe_machine()
