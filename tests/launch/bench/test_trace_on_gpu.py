"""A real trace of a CUDA device: its kernels find their ops and steps, with and without CUDA graphs."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.ceilings import DeviceRates
from bulkrun.launch.bench.op_table import OTHER, idle_shares, op_table
from bulkrun.launch.bench.traced_run import trace_steps
from bulkrun.launch.bench.workload import Lengths, random_work
from tests.models.tiny_models import VOCAB_SIZE, save_tiny_model

pytestmark = pytest.mark.gpu
RATES = DeviceRates(gemm_flop_s=1e15, read_bytes_s=5e12)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_every_op_of_the_model_has_kernels_and_steps_have_gaps(tmp_path: Path, enforce_eager: bool) -> None:
    engine = LLMEngine.from_model_dir(
        save_tiny_model(tmp_path, "qwen3"), device="cuda", dtype="bfloat16", max_num_seqs=4, enforce_eager=enforce_eager
    )
    work = random_work(40, Lengths(5, 20), Lengths(8, 12), shared_prefix=0, vocab_size=VOCAB_SIZE)
    traced = trace_steps(engine, cycle(work), width=4, num_steps=16)
    rows = {row["op"]: row for row in op_table(traced.by_op, traced.calls, RATES)}
    products = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert rows.keys() >= {*products, "attention, decode", "attention, prefill", "norm_rotary_store", "sampling"}
    assert rows[OTHER]["share_of_time"] < 0.5
    idle = idle_shares(traced.plain)
    assert idle is not None and idle["steps"] >= 8 and 0 < idle["share"] < 1
    assert not engine.has_unfinished()
