"""Each worker its own GPU, or its share of the cores; an existing choice of the user is respected."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from bulkrun.errors import UsageError
from bulkrun.executors import devices
from bulkrun.executors.devices import visible_gpus, worker_environments


@pytest.fixture(autouse=True)
def _driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_DRIVERS", ("/",))


CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("named", "gpus"),
    [("0,1", ["0", "1"]), ("3, 5", ["3", "5"]), ("GPU-aa,MIG-bb", ["GPU-aa", "MIG-bb"]), ("", []), ("-1", [])],
)
def test_a_choice_of_gpus_is_respected(named: str, gpus: list[str]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == gpus


def test_names_of_gpus_that_cannot_be_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "_DRIVERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == []


@pytest.mark.parametrize(
    "named",
    [
        "2,-1,3",
        "NoDevFiles",
        "none",
        "0,NoDevFiles,1",
        "0,,1",
        ",0",
        " 0 ,1,",
        "+1,2",
        "GPU-aa,x,GPU-bb",
        "MIG-a,MIG-b",
        "all",
    ],
)
def test_entries_after_an_invalid_one_do_not_count_as_cuda_has_it(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    """Torch reads the variable as CUDA does."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    shown = [str(one) for one in torch.cuda._parse_visible_devices()]
    assert [gpu.lstrip("+") for gpu in visible_gpus()] == shown


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\necho '  MIG 1g: y'\necho 'GPU 1: B (UUID: z)'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert visible_gpus({}) == ["0", "1"]
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\n")
    monkeypatch.setattr(devices, "_DRIVERS", ())  # as in some containers
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == ["0"]
    program.write_text("#!/bin/sh\necho 'GPU 0: A (UUID: x)'\nexec sleep 9\n")
    monkeypatch.setattr(devices, "_PATIENCE_S", 0.1)
    assert visible_gpus({}) == [], "a driver that hangs has none"
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert visible_gpus({}) == []


def test_one_gpu_each_and_threads_divided() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    threads = str(max(1, CORES // 2))
    assert worker_environments(2, "auto", environ) == [
        {"CUDA_VISIBLE_DEVICES": "4", "OMP_NUM_THREADS": threads},
        {"CUDA_VISIBLE_DEVICES": "6", "OMP_NUM_THREADS": threads},
    ]
    assert worker_environments(1, "auto", environ) == [{"CUDA_VISIBLE_DEVICES": "4"}]


def test_more_workers_than_gpus_is_a_mistake_except_on_cpu() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "4,6"}
    with pytest.raises(UsageError, match=r"run\.workers is 3, but there are 2 GPUs"):
        worker_environments(3, "auto", environ)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in worker_environments(2, "auto", environ)] == ["4", "6"]
    assert worker_environments(3, "cpu", environ) == [{"OMP_NUM_THREADS": str(max(1, CORES // 3))}] * 3


def test_a_set_number_of_threads_is_kept() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "3"}
    assert worker_environments(2, "auto", environ) == [{}, {}]
