"""What is refused before a model is loaded: GPUs without kernels, machines on which Triton cannot launch any."""

import errno
import shutil
from types import SimpleNamespace

import pytest
import torch

from bulkrun.engine import device
from bulkrun.errors import UsageError

PROBLEM = device._triton_problem.__wrapped__


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU of compute capability 9.0 on which Triton works."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    monkeypatch.setattr(device, "_triton_problem", lambda: None)
    return monkeypatch


def test_a_gpu_with_kernels_is_taken(gpu: pytest.MonkeyPatch) -> None:
    device.refuse_gpu_without_kernels()


def test_the_oldest_gpu_that_will_do_is_taken(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    device.refuse_gpu_without_kernels()


@pytest.mark.parametrize(("usable", "found"), [(True, "cuda"), (False, "cpu")])
def test_auto_is_the_gpu_where_there_is_one(usable: bool, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
    assert device.resolve_device("auto").type == found
    assert device.resolve_device("cpu").type == "cpu"


def test_an_old_gpu_is_refused_by_name(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    with pytest.raises(UsageError, match=r"Tesla T4 has compute capability 7\.5.* need 8\.0 or above.*device: cpu"):
        device.refuse_gpu_without_kernels()


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("Failed to find C compiler"), r"Failed to find C compiler\. .*gcc python3-dev.*in CC"),
        (FileNotFoundError(errno.ENOENT, "no", "/usr/bin/cc"), r"'/usr/bin/cc'\. .*gcc python3-dev"),
        (PermissionError(errno.EACCES, "no", "/home/a/.triton"), r"'/home/a/.triton'\. .* written in TRITON_CACHE_DIR"),
        (OSError(errno.ENOSPC, "no"), r"TRITON_CACHE_DIR"),
    ],
)
def test_what_triton_lacks_is_named_with_what_to_do(
    raised: Exception, said: str, gpu: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that cannot be written (a compute node's, cron's) was told to install a compiler."""
    runtime = pytest.importorskip("triton.runtime")

    def fail() -> None:
        raise raised

    monkeypatch.setattr(runtime, "driver", SimpleNamespace(active=SimpleNamespace(get_current_target=fail)))
    gpu.setattr(device, "_triton_problem", PROBLEM)
    with pytest.raises(UsageError, match=rf"Triton cannot launch kernels here: .*{said}.*; engine\.device: cpu"):
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
