"""Which captured shape a step is padded to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.scheduled_batch import KVCopy, ScheduledBatch
from bulkrun.engine.step.step_shape import CapturedShapes, StepShape, max_captured_tokens
from bulkrun.launch.bench.shapes import write_shape
from bulkrun.models.config.model_config import ModelConfig


def batch_of(contexts: list[int], chunks: list[int]) -> ScheduledBatch:
    return ScheduledBatch(
        seqs=cast(Any, [None] * (len(contexts) + len(chunks))),
        starts=[context - 1 for context in contexts] + [0] * len(chunks),
        num_scheduled_tokens=[1] * len(contexts) + chunks,
        num_decode_seqs=len(contexts),
    )


@settings(max_examples=200)
@given(
    contexts=st.lists(st.integers(1, 300_000), max_size=70),
    chunks=st.lists(st.integers(1, 300), max_size=6),
    max_num_tokens=st.integers(64, 900),
)
def test_the_smallest_shape_with_room_for_everything_or_none(
    contexts: list[int], chunks: list[int], max_num_tokens: int
) -> None:
    if not contexts and not chunks:
        return
    shapes = CapturedShapes(max_num_seqs=64, max_num_tokens=max_num_tokens, max_model_len=300_000)
    exact = StepShape.of(batch_of(contexts, chunks))

    def has_room(shape: StepShape) -> bool:
        return (
            (shape.num_chunk_seqs > 0) == bool(chunks)
            and shape.num_tokens >= exact.num_tokens
            and shape.num_decode_seqs >= len(contexts)
            and shape.num_chunk_seqs >= len(chunks)
            and shape.max_decode_keys >= exact.max_decode_keys
        )

    fitting = [shape for shape in shapes if has_room(shape)]
    fit = shapes.fit(batch_of(contexts, chunks)) if len(contexts) <= 64 else None
    assert fit == (min(fitting, key=lambda shape: shape.num_tokens) if fitting else None)


def test_the_largest_come_first_and_no_shape_comes_twice() -> None:
    shapes = list(CapturedShapes(max_num_seqs=1000, max_num_tokens=8192, max_model_len=4096))
    assert [shape.num_tokens for shape in shapes] == sorted((shape.num_tokens for shape in shapes), reverse=True)
    assert len(set(shapes)) == len(shapes) < 80
    assert max(shape.num_decode_seqs for shape in shapes if not shape.num_chunk_seqs) == 1000


def test_padding_of_decode_steps_stays_below_an_eighth() -> None:
    shapes = CapturedShapes(max_num_seqs=1024, max_num_tokens=1024, max_model_len=4096)
    for num_seqs in range(64, 1025):
        fit = shapes.fit(batch_of([5] * num_seqs, []))
        assert fit is not None
        assert fit.num_tokens < num_seqs * 9 / 8


def test_one_long_context_among_many_short_ones_takes_no_step_out_of_the_graphs() -> None:
    shapes = CapturedShapes(max_num_seqs=1024, max_num_tokens=1024, max_model_len=131_072)
    for chunks in ([], [700]):
        assert shapes.fit(batch_of([131_072] + [300] * 300, chunks)) is not None
    assert shapes.fit(batch_of([131_072] * 100, [])) is None


def test_copies_of_blocks_fit_in_no_shape() -> None:
    shapes = CapturedShapes(max_num_seqs=8, max_num_tokens=64, max_model_len=4096)
    batch = batch_of([5], [])
    assert shapes.fit(batch) is not None
    batch.kv_copies.append(KVCopy(1, 2, 3))
    assert shapes.fit(batch) is None


@pytest.mark.parametrize(
    ("hidden", "inner", "is_in_fp8", "expected"),
    [
        (4096, 14336, False, range(700, 1000)),
        (4096, 14336, True, range(2000, 2600)),
        (8192, 28672, False, range(256, 257)),
        (8192, 28672, True, range(500, 700)),
        (1024, 3072, False, range(8192, 8193)),
    ],
)
def test_large_models_are_captured_for_small_steps_only(
    hidden: int, inner: int, is_in_fp8: bool, expected: range
) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": hidden // 128}
    others = {"num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 3, "vocab_size": 99}
    config = ModelConfig.from_dict({"architectures": ["LlamaForCausalLM"], **sizes, **others})
    assert max_captured_tokens(config, 8192, is_in_fp8=is_in_fp8) in expected


def test_layers_that_differ_count_as_their_mean(tmp_path: Path) -> None:
    """20 of 35 have MLPs twice as wide and no keys, 7 have heads twice as wide: 53 million weights a layer."""
    config = ModelConfig.from_dir(write_shape("gemma-4-e2b", tmp_path, dtype="bfloat16", max_model_len=4096))
    assert max_captured_tokens(config, 8192, is_in_fp8=False) in range(3200, 3700)
