"""Lists that travel together arrive apart, each as what it was."""

from __future__ import annotations

from array import array

import pytest
import torch

from bulkrun.engine.step.staging import HostStaging

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_lists_arrive_as_they_were_sent(device: str) -> None:
    staging = HostStaging(torch.device(device))
    sent = [[1, -(2**62), 3], [], [7], (5, 6)]
    for _ in range(3):
        got = staging.send(*sent)
        assert [tensor.tolist() for tensor in got] == [list(values) for values in sent]
        assert all(tensor.dtype == torch.int64 and tensor.device.type == device for tensor in got)
        assert all(tensor.storage_offset() % 2 == 0 for tensor in got), "aligned to 16 bytes, as kernels are compiled"
    assert [tensor.tolist() for tensor in staging.send([], [])] == [[], []]


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_keep_their_type(device: str) -> None:
    staging = HostStaging(torch.device(device))
    assert staging.send_array(array("f", [0.5, -2.0]), torch.float32).tolist() == [0.5, -2.0]
    assert staging.send_array(array("i", [3, -4]), torch.int32).tolist() == [3, -4]
    assert staging.send_array(array("i"), torch.int32).shape == (0,)


@pytest.mark.gpu
def test_a_copy_under_way_is_not_overwritten_by_the_next() -> None:
    """The device is kept busy, so that many copies wait while the host goes on sending."""
    staging = HostStaging(torch.device("cuda"))
    torch.cuda._sleep(100_000_000)
    got = [staging.send([number] * 1000)[0] for number in range(50)]
    assert [tensor.unique().tolist() for tensor in got] == [[number] for number in range(50)]
