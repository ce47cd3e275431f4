"""What an op cannot do without, against counting by hand, and against the ceilings of whole requests."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench import op_recorder
from bulkrun.launch.bench.ceilings import DeviceRates, ModelCost, ceilings
from bulkrun.launch.bench.measure import run_workload
from bulkrun.launch.bench.op_costs import OpCost, StepSequences, attention_cost, experts_cost, product_cost
from bulkrun.launch.bench.op_recorder import OpRecorder
from bulkrun.launch.bench.traced_run import trace_steps
from bulkrun.launch.bench.workload import Work
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.windows import Chunks, Window
from tests.models.loading.test_stored_int8 import needs_int8
from tests.models.tiny_models import known, save_tiny_model
from tests.models.tiny_quantized import WHOLE


def _sees(query: int, key: int, window: Window | None) -> bool:
    if isinstance(window, Chunks):
        return query // window.size == key // window.size
    return window is None or query - key < window


@pytest.mark.parametrize("window", [None, 1, 4, 100, Chunks(4), Chunks(7)])
def test_attention_counts_the_pairs_of_a_mask_and_the_keys_that_some_query_sees(window: Window | None) -> None:
    shape = StepSequences(starts=(5, 0, 3), counts=(1, 4, 6), num_decode_seqs=1)
    pairs = keys = 0
    for start, count in zip(shape.starts, shape.counts, strict=True):
        seen = {
            (query, key)
            for query in range(start, start + count)
            for key in range(query + 1)
            if _sees(query, key, window)
        }
        pairs, keys = pairs + len(seen), keys + len({key for _, key in seen})
    cost = attention_cost(shape, attention_width=12, kv_bytes=7, window=window, itemsize=2)
    assert cost == OpCost(4 * 12 * pairs, 7 * keys + 2 * 12 * 2 * 11)


def test_a_step_is_the_sum_of_its_decode_and_its_prefill() -> None:
    shape = StepSequences(starts=(5, 0, 3), counts=(1, 4, 6), num_decode_seqs=1)
    whole, decode, prefill = (
        attention_cost(part, attention_width=3, kv_bytes=5, window=None, itemsize=2)
        for part in (shape, shape.decode, shape.prefill)
    )
    assert whole == OpCost(decode.flops + prefill.flops, decode.num_bytes + prefill.num_bytes)
    assert (shape.kind, shape.decode.kind, shape.prefill.kind) == ("mixed", "decode", "prefill")


def test_products_read_their_weights_once_and_experts_only_those_that_are_needed() -> None:
    assert product_cost(3, 50, weight_itemsize=1, activation_bytes=8) == OpCost(300, 58)
    few = experts_cost(1, num_experts=8, experts_per_tok=2, expert_weights=50, itemsize=2)
    many = experts_cost(100, num_experts=8, experts_per_tok=2, expert_weights=50, itemsize=2)
    assert (few, many) == (OpCost(200, 200), OpCost(20_000, 800))


WORK = [Work([5 + n, 6, 7, 8, 9], length) for n, length in enumerate([1, 9, 12, 7, 11])]


@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
@pytest.mark.parametrize("variant", ["llama", "qwen3", "mixtral"])
def test_the_ops_of_a_run_add_up_to_the_flops_of_its_ceiling(
    variant: str, quantization: str | None, tmp_path: Path
) -> None:
    """Every token goes through the model once, except each request's last, which nobody reads.

    In the last layer's MLP no more of a prompt than its last token.
    """
    engine = _engine(save_tiny_model(tmp_path, variant), quantization=quantization)
    recorder = OpRecorder(engine)
    with recorder.steps_and_ops():
        run_workload(engine, WORK)
    recorded = sum(call.cost.flops for call in recorder.calls)
    config = ModelConfig.from_dir(tmp_path)
    cost = ModelCost.of(config, 4)
    read = [Work(one.prompt_token_ids, one.num_output_tokens - 1) for one in WORK]
    rates = DeviceRates(gemm_flop_s=1.0, read_bytes_s=1.0)
    heads = 2 * cost.num_lm_head_weights * len(WORK)  # lm_head on the last token of a prompt
    saved = 2 * _mlp_weights(config) * sum(len(one.prompt_token_ids) - 1 for one in WORK)
    assert recorded == ceilings(cost, read, rates).gemm_s + heads - saved


@needs_int8
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_experts_are_an_op_of_their_own(quantization: str | None, deterministic: bool, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "mixtral", **WHOLE)
    engine = _engine(path, quantization=quantization, deterministic=deterministic)
    recorder = OpRecorder(engine)
    with recorder.steps_and_ops():
        steps = run_workload(engine, WORK).widths
    experts, layers = [call for call in recorder.calls if call.name == "experts"], 3
    assert len(experts) == layers * len(steps)
    sizes, top_k = WHOLE["hidden_size"] * WHOLE["intermediate_size"], 2
    assert all(call.cost.flops == 2 * 3 * sizes * top_k * call.rows for call in experts)


def test_experts_of_eight_bits_are_an_op_that_reads_a_byte_a_weight(tmp_path: Path) -> None:
    engine = _engine(save_tiny_model(tmp_path, "mixtral"), quantization="fp8")
    recorder = OpRecorder(engine)
    with recorder.steps_and_ops():
        run_workload(engine, WORK)
    experts = [call for call in recorder.calls if call.name == "experts"]
    assert len(experts) == 3 * recorder._num_steps
    num_weights, num_experts, top_k = 3 * 48 * 72, 5, 2
    for call in experts:
        assert call.cost.flops == 2 * num_weights * top_k * call.rows
        assert call.cost.num_bytes == min(top_k * call.rows, num_experts) * num_weights


@pytest.mark.parametrize(("value_dim", "numbers"), [(6, 2 * 6), (4, 6)])  # values of 4 lie in their keys
def test_attention_reads_keys_and_values_and_its_products_are_as_wide_as_each(value_dim: int, numbers: int) -> None:
    """One token that sees 6, with 4 heads of 6 dimensions; floats."""
    recorder = OpRecorder(None)  # type: ignore[arg-type]
    recorder._step = StepSequences(starts=(5,), counts=(1,), num_decode_seqs=1)
    found, query = torch.zeros(1, 4, value_dim), torch.zeros(1, 4, 6)
    caches = torch.zeros(2, 4, 1, 6), torch.zeros(2, 4, 1, value_dim)
    call = recorder._attention(found, query, *caches, sliding_window=None)
    assert (call.name, call.rows) == ("attention, decode", 1)
    assert call.cost == OpCost(6 * 4 * 2 * (6 + value_dim), 4 * (6 * numbers + 4 * (6 + value_dim)))


def test_a_state_is_read_and_written_once_a_sequence_and_multiplied_for_each_token() -> None:
    """Of two sequences five tokens; three products of a state of 2 heads of 4 by 6 floats."""
    price = op_recorder._pass_over_states("gated_delta_rule", 3)
    states, meta = torch.zeros(3, 2, 4, 6), SimpleNamespace(rows_S=[0, 2])
    call = price(torch.zeros(5, 2, 6), torch.zeros(5, 7), states, meta)
    assert call.cost == OpCost(2 * 3 * 5 * 48, 4 * (5 * 7 + 5 * 12 + 2 * 2 * 48))


def test_passes_over_tensors_are_as_many_as_they_read_and_write(tmp_path: Path) -> None:
    engine = _engine(save_tiny_model(tmp_path, "llama"))
    recorder = OpRecorder(engine)
    with recorder.steps_and_ops():
        run_workload(engine, WORK)
    hidden, inner = 48, 72
    moved = {"rms_norm": 2 * hidden, "add_rms_norm": 4 * hidden, "silu_mul": 3 * inner}
    for name, numbers in moved.items():
        calls = [call for call in recorder.calls if call.name == name]
        assert calls and all(call.cost == OpCost(0, 4 * numbers * call.rows) for call in calls), name


def _mlp_weights(config: DecoderConfig) -> int:
    """That a token meets in one layer's MLP."""
    if config.moe is None:
        return 3 * config.hidden_size * config.intermediate_size
    expert = 3 * config.hidden_size * config.moe.intermediate_size
    return expert * config.moe.num_experts_per_tok + config.hidden_size * config.moe.num_experts


@pytest.mark.parametrize(
    "variant",
    known(
        [
            "llama",
            "qwen3_5",
            "olmo_hybrid",
            "granite_h",
            "lfm2",
            "falcon_h1",
            "gemma3n",
            "gemma4",
            "gemma4_moe",
            "minicpm3",
            "cohere2",
            "apertus",
            "kimi_linear",
            "jamba",
            "falcon_mamba",
            "falcon",
        ]
    ),
)
def test_recording_changes_no_token_and_leaves_no_trace(variant: str, tmp_path: Path) -> None:
    engine = _engine(save_tiny_model(tmp_path, variant))
    before = _functions(engine)
    expected = run_workload(engine, WORK).output_tokens
    traced = trace_steps(engine, cycle(WORK), width=2, num_steps=3)
    assert _functions(engine) == before
    assert {busy.step for busy in traced.by_op} == {1, 2, 3, None}
    assert not engine.has_unfinished()
    assert run_workload(engine, WORK).output_tokens == expected


def _engine(path: Path, **settings: object) -> LLMEngine:
    settings |= {"max_num_seqs": 2, "kv_cache_memory_bytes": 8 * 2**20}
    return LLMEngine.from_model_dir(path, device="cpu", dtype="float32", **settings)


def _functions(engine: LLMEngine) -> list[object]:
    from bulkrun import ops

    model = engine.model_runner.model
    assert isinstance(model, torch.nn.Module)
    own = [value for module in model.modules() for name, value in vars(module).items() if callable(value)]
    return [*own, *vars(ops).values(), "start" in vars(engine.model_runner)]
