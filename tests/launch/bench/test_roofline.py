"""What a roofline says of a run, against its own time and the arithmetic of its ceilings."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.launch.bench.ceilings import DeviceRates, ModelCost, ceilings
from bulkrun.launch.bench.engine import ModelChoice, load_for_bench
from bulkrun.launch.bench.roofline import roofline_of
from bulkrun.launch.bench.throughput import Asked
from tests.models.tiny_models import save_tiny_model


def test_the_shares_of_a_run_are_the_ceilings_over_its_time(tmp_path: Path) -> None:
    """The device's rates are so low that nothing is lost in rounding."""
    settings = {"device": "cpu", "dtype": "float32", "kv_cache_dtype": "bfloat16"}
    choice = ModelChoice(str(save_tiny_model(tmp_path, "llama")), None, settings)
    loaded, rates = load_for_bench(choice), DeviceRates(2e6, 3e6)
    asked = Asked(input_len="9", output_len="8", num_requests=3)
    facts = roofline_of(choice, asked, loaded, rates, trace=False)
    limits = ceilings(ModelCost.of(loaded.config, kv_itemsize=2), asked.work(loaded), rates)
    assert (facts["gemm_tflop_s"], facts["read_gb_s"]) == (0.0, 0.0)
    assert facts["steps"] == 8, "three sequences at once"
    named = {
        "serial": limits.gemm_s + limits.kv_s,
        "max": max(limits.gemm_s, limits.kv_s),
        "nanoflow": limits.nanoflow_s,
    }
    for name, least_s in named.items():
        assert facts[f"{name}_s"] == pytest.approx(least_s, abs=1e-4)
        share = facts[f"share_of_{name}"]
        assert share / facts["share_of_serial"] == pytest.approx(least_s / named["serial"], rel=1e-3)
        assert share * facts["wall_s"] == pytest.approx(least_s, abs=1e-3 * share + 1e-3), "a time in milliseconds"
    assert len({round(one, 4) for one in named.values()}) == 3
    assert "idle" not in facts and "sustained_gemm_tflop_s" not in facts


def test_a_devices_rates_are_told_in_units_of_thousands(tmp_path: Path) -> None:
    choice = ModelChoice(str(save_tiny_model(tmp_path, "llama")), None, {"device": "cpu", "dtype": "float32"})
    rates = DeviceRates(790e12, 4300e9, 680e12)
    facts = roofline_of(choice, Asked(None, "9", "2", 2), load_for_bench(choice), rates, trace=False)
    assert (facts["gemm_tflop_s"], facts["read_gb_s"], facts["sustained_gemm_tflop_s"]) == (790, 4300, 680)
