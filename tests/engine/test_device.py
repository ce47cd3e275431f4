"""What is refused before a model is loaded: GPUs without kernels, machines on which Triton cannot launch any."""

import shutil

import pytest
import torch

from bulkrun.engine import device
from bulkrun.errors import UsageError


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 9.0 on which Triton works."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(device, "_triton_problem", lambda: None)
    return monkeypatch


def test_a_gpu_with_kernels_is_taken(gpu: pytest.MonkeyPatch) -> None:
    device.refuse_gpu_without_kernels()


def test_an_old_gpu_is_refused_by_name(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(UsageError, match=r"Tesla T4 has compute capability 7\.5.* need 8\.0 or above.*device: cpu"):
        device.refuse_gpu_without_kernels()


def test_what_triton_lacks_is_named(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(device, "_triton_problem", lambda: "RuntimeError: Failed to find C compiler")
    with pytest.raises(UsageError, match=r"Failed to find C compiler.*gcc python3-dev.*in CC"):
        device.refuse_gpu_without_kernels()


def test_without_triton_the_references_run(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(device, "_triton_problem", lambda: "no Triton")
    gpu.setattr(device, "has_triton", lambda: False)
    device.refuse_gpu_without_kernels()


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's driver loads here")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="another problem comes first")
def test_a_driver_that_does_not_load_is_told_in_a_line() -> None:
    pytest.importorskip("triton")
    device._triton_problem.cache_clear()
    problem = device._triton_problem()
    assert problem is not None and "\n" not in problem and ": " in problem
