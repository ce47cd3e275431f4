"""Traces that are known: whose work is whose, what a row of the table says, and which gaps count as idle."""

from __future__ import annotations

from typing import Any

import pytest

from bulkrun.launch.bench.ceilings import DeviceRates
from bulkrun.launch.bench.device_trace import Busy, device_work
from bulkrun.launch.bench.op_costs import OpCall, OpCost
from bulkrun.launch.bench.op_table import idle_shares, op_table

RATES = DeviceRates(gemm_flop_s=1e12, read_bytes_s=1e9)


def event(category: str, name: str, start_us: float, end_us: float, **args: Any) -> dict[str, Any]:
    return {
        "ph": "X", "cat": category, "name": name, "tid": 1, "ts": start_us, "dur": end_us - start_us, "args": args
    }  # fmt: skip


def seconds(work: list[Busy]) -> list[tuple[float, float, int | None, int | None]]:
    return [(round(b.start_s * 1e6), round(b.end_s * 1e6), b.call, b.step) for b in work]


def test_a_kernel_belongs_to_the_op_and_the_step_that_launched_it_however_late_it_runs() -> None:
    events = [
        event("user_annotation", "bulkrun-step#7", 0, 100),
        event("user_annotation", "bulkrun-op#0", 10, 40),
        event("cuda_runtime", "cudaLaunchKernel", 12, 14, correlation=1),
        event("cuda_driver", "cuLaunchKernelEx", 20, 24, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 50, 52, correlation=3),  # in no op: an embedding, say
        event("cuda_runtime", "cudaMemsetAsync", 40, 41, correlation=6),  # as the op has just ended
        event("user_annotation", "bulkrun-step#8", 100, 200),
        event("user_annotation", "bulkrun-op#1", 110, 140),
        event("cuda_runtime", "cudaGraphLaunch", 120, 121, correlation=4),
        event("cuda_runtime", "cudaMemcpyAsync", 210, 211, correlation=5),  # outside every step
        event("kernel", "gemm", 300, 400, correlation=1),
        event("kernel", "decode", 400, 450, correlation=2),
        event("kernel", "index", 460, 470, correlation=3),
        event("kernel", "first of a graph", 500, 510, correlation=4),
        event("kernel", "second of a graph", 510, 530, correlation=4),
        event("gpu_memcpy", "DtoH", 600, 601, correlation=5),
        event("gpu_memset", "zeros", 602, 603, correlation=6),
        event("gpu_user_annotation", "bulkrun-op#0", 300, 450),
        {"ph": "M", "name": "process_name", "ts": 0},
    ]
    assert seconds(device_work(events)) == [
        (300, 400, 0, 7),
        (400, 450, 0, 7),
        (460, 470, None, 7),
        (500, 510, 1, 8),
        (510, 530, 1, 8),
        (600, 601, None, None),
        (602, 603, None, 7),
    ]


def test_on_a_gpu_the_innermost_op_has_the_kernel_and_other_threads_have_their_own() -> None:
    other = event("cuda_runtime", "cudaLaunchKernel", 22, 23, correlation=3) | {"tid": 2}
    events = [
        event("user_annotation", "bulkrun-step#1", 0, 90),
        event("user_annotation", "bulkrun-op#0", 10, 50),
        event("user_annotation", "bulkrun-op#1", 20, 30),
        event("cuda_runtime", "cudaLaunchKernel", 21, 22, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 31, 32, correlation=2),
        other,
        *(event("kernel", "k", 100 * n, 100 * n + 5, correlation=n) for n in (1, 2, 3)),
    ]
    assert [(busy.call, busy.step) for busy in device_work(events)] == [(1, 1), (0, 1), (None, None)]


def test_on_a_cpu_an_op_works_from_call_to_return_and_what_it_calls_is_part_of_it() -> None:
    events = [
        event("user_annotation", "bulkrun-step#1", 0, 100),
        event("cpu_op", "aten::embedding", 5, 15),
        event("cpu_op", "aten::index_select", 6, 14),
        event("user_annotation", "bulkrun-op#0", 20, 60),
        event("cpu_op", "aten::linear", 25, 55),
        event("user_annotation", "somebody else's", 62, 98),
        event("cpu_op", "aten::add", 70, 80),
        event("cpu_op", "aten::mul", 80, 85),
        event("cpu_op", "aten::sum", 90, 91),
        event("user_annotation", "bulkrun-op#1", 90, 95),
        event("cpu_op", "aten::argmax", 110, 120),
    ]
    expected = [
        *((5, 15, None, 1), (20, 60, 0, 1), (70, 80, None, 1), (80, 85, None, 1), (90, 95, 1, 1)),
        (110, 120, None, None),
    ]
    assert seconds(device_work(events)) == expected


def test_gaps_are_idle_inside_a_step_or_between_two_and_overlapping_work_is_none() -> None:
    """Steps begin at 0, 10 and 22: of 22 seconds 1 + 1 were idle inside a step, 2 + 3 before another one's work."""
    work = [
        Busy(0, 3, None, 1),
        Busy(2, 4, None, 1),  # another stream
        Busy(5, 8, None, 1),
        Busy(10, 14, None, 2),
        Busy(11, 12, None, 2),
        Busy(15, 19, None, 2),
        Busy(22, 30, None, 3),
        Busy(40, 50, None, 3),  # the last step only ends the one before
    ]
    assert idle_shares(work) == {
        "share": round(7 / 22, 4),
        "between_steps": round(5 / 22, 4),
        "inside_steps": round(2 / 22, 4),
        "steps": 2,
        "wall_s": 22,
    }


@pytest.mark.parametrize("work", [[], [Busy(0, 1, None, None)], [Busy(0, 1, None, 4), Busy(2, 3, None, 4)]])
def test_without_two_steps_nobody_knows_how_idle_the_device_was(work: list[Busy]) -> None:
    assert idle_shares(work) is None


def test_a_row_adds_its_calls_up_and_compares_each_with_the_ceiling_that_binds_it() -> None:
    calls = [
        OpCall("qkv_proj", 5, OpCost(flops=2e12, num_bytes=1e9)),  # at least 2 s, by FLOPs
        OpCall("qkv_proj", 8, OpCost(flops=1e12, num_bytes=3e9)),  # at least 3 s, by bytes
        OpCall("qkv_proj", 9, OpCost(flops=1e12, num_bytes=0)),  # another power of two
        OpCall("silu_mul", 5, OpCost(num_bytes=1e9)),
        OpCall("silu_mul", 4000, OpCost(num_bytes=1e9)),  # no product: one row of the table for all
        OpCall("sampling", 3, OpCost(num_bytes=7e9)),  # not in the trace
        OpCall("sampling, shorter than the clock can tell", 3, OpCost()),
    ]
    work = [
        Busy(0, 4, 0, 1),
        Busy(4, 6, 0, 1),  # a second kernel of the same call
        Busy(6, 10, 1, 1),
        Busy(10, 12, 2, 1),
        Busy(12, 13, 3, 1),
        Busy(13, 16, 4, 1),
        Busy(16, 20, None, 1),
        Busy(20, 20, 6, 1),
    ]
    rows = {(row["op"], row["rows"]): row for row in op_table(work, calls, RATES)}
    assert list(rows) == [("qkv_proj", "5-8"), ("silu_mul", "5-4000"), ("other", None), ("qkv_proj", "9")]
    assert rows["qkv_proj", "5-8"] == {
        "op": "qkv_proj",
        "rows": "5-8",
        "calls": 2,
        "seconds": 10,
        "median_us": 5e6,  # 4 + 2 and 4 seconds
        "share_of_time": 0.5,
        "tflop_s": 0.3,
        "gb_s": 0.4,
        "share_of_ceiling": 0.5,  # 2 + 3 of 10 seconds
    }
    assert (rows["silu_mul", "5-4000"]["tflop_s"], rows["silu_mul", "5-4000"]["share_of_ceiling"]) == (None, 0.5)
    assert (rows["other", None]["calls"], rows["other", None]["gb_s"]) == (None, None)


@pytest.mark.parametrize("name", ["qkv_proj", "lm_head", "router", "experts"])
def test_products_of_few_rows_are_not_mixed_with_those_of_many(name: str) -> None:
    calls = [OpCall(name, rows, OpCost(flops=1e12)) for rows in (1, 2, 3, 4, 5, 1024, 1025)]
    work = [Busy(2 * number, 2 * number + 1, number, 1) for number in range(len(calls))]
    assert sorted(row["rows"] for row in op_table(work, calls, RATES)) == ["1", "1024", "1025", "2", "3-4", "5"]


def test_of_one_call_the_kernels_named_prefill_are_a_row_of_their_own() -> None:
    calls = [OpCall("decode", 3, OpCost(num_bytes=2e9), prefill=OpCall("prefill", 50, OpCost(flops=1e12)))]
    work = [Busy(0, 4, 0, 1, "_decode_kernel"), Busy(4, 6, 0, 1, "_prefill_kernel"), Busy(6, 7, 0, 1, "_merge_kernel")]
    rows = {row["op"]: (row["rows"], row["seconds"], row["share_of_ceiling"]) for row in op_table(work, calls, RATES)}
    assert rows == {"decode": ("3", 5, 0.4), "prefill": ("50", 2, 0.5)}
