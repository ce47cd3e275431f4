"""The timers of `step_cost` hang on names inside the engine: they must still be there, and take what they say."""

from __future__ import annotations

from bulkrun.launch.bench.engine import ModelChoice, load_for_bench
from tests.benchmarks.step_cost import measure


def test_every_part_of_a_step_is_timed() -> None:
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 2**24}
    engine = load_for_bench(ModelChoice("bundled:tiny", None, settings)).engine
    cost = measure(engine, num_seqs=3, num_steps=4)
    parts = {"schedule", "inputs", "rotary", "sample", "land"}
    assert cost.keys() == parts | {"layers", "head", "beside", "step"}
    assert all(cost[part] > 0 for part in parts) and cost["beside"] < cost["step"]
    assert not engine.has_unfinished()
