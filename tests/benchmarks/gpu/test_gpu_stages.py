"""The script for the GPU, without one: what fits, what is left out, what a line and the report say."""

from __future__ import annotations

import json
import re
import time
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.benchmarks.gpu import __main__ as gpu_script
from tests.benchmarks.gpu import checkpoint
from tests.benchmarks.gpu.items import Item, Prediction, ablations, beside_vllm, fitted, smoke, targets_1, targets_2
from tests.benchmarks.gpu.processes import python
from tests.benchmarks.gpu.report import measured_value, report
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.stages import Session, _measure, vllm


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_what_fits_runs_whole_and_what_does_not_is_cut_by_the_same_share() -> None:
    items = targets_1()
    assert fitted(items, 3600.0) == items
    cut = fitted(items, 300.0)
    shares = [one.num_requests / whole.num_requests for one, whole in zip(cut, items, strict=True)]
    assert max(shares) - min(shares) < 0.01 and shares[0] < 0.9
    assert sum(item.seconds for item in cut) < 300.0
    assert [item.num_requests for item in fitted(ablations(), 1.0) if item.is_fixed] == [256] * 4


def test_two_calls_of_the_device_hold_the_targets_with_more_requests_than_run_at_once() -> None:
    """Nine minutes each, the first beside two minutes of tests."""
    big = [item for item in (*fitted(targets_1(), 420.0), *fitted(targets_2(), 540.0)) if item.num_requests > 1024]
    assert {item.name for item in big} == {"1024/512", "1024/256", "2048/128", "128/1024", "512/512"}
    assert min(item.num_requests for item in big) > 1400


def test_the_carried_wheels_bring_what_they_need() -> None:
    """Nothing is installed on the device machine, and pip fetches no dependencies."""
    (pattern,) = re.findall(r"'\^\((pydantic.*)\)==", gpu_script.__doc__ or "")
    carried = {canonical(name) for name in pattern.split("|")}
    needed = {
        canonical(re.split(r"[^\w.-]", line)[0])
        for name in carried
        for line in requires(name) or []
        if "extra ==" not in line
    }
    assert needed - carried <= {"attrs"}, "that one is there"


def test_names_and_what_is_divided_by_belong_to_one_stage() -> None:
    for items in (targets_1(), targets_2(), ablations(), beside_vllm()):
        names = [item.name for item in items]
        assert len(set(names)) == len(names)
        assert {one.over for item in items for one in item.predictions} <= {None, *names}


def test_a_result_is_there_once_measured_and_the_later_line_counts(tmp_path: Path) -> None:
    earlier, results = tmp_path / "1.jsonl", Results(tmp_path / "results.jsonl", (tmp_path / "1.jsonl",))
    Results(earlier).add("ops", "a", facts={"us": 1})
    Results(earlier).add("ops", "b", error="exit 1: out of memory")
    assert results.has("ops", "a") and not results.has("ops", "b") and not results.has("load", "a")
    results.add("ops", "b", [Prediction("us", 2.0, 3.0)], facts={"us": 4})
    assert [(line["name"], line["facts"]["us"]) for line in results.lines()] == [("a", 1), ("b", 4)]


def test_the_report_has_figures_beside_predictions_and_says_what_failed(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    ratio = Prediction("total_tok_s", 1.25, 1.2, over="plain")
    results.add("s", "plain", facts={"total_tok_s": 100.0, "requests": 3000, "ops": [{"op": "lm_head", "rows": "3"}]})
    results.add("s", "fp8", [ratio], facts={"total_tok_s": 130.0, "idle": {"share": 0.25}})
    results.add("s", "broken", [ratio], error="exit 1: no|thing")
    lines = report(results.lines()).splitlines()
    assert "| fp8 |  | total_tok_s over plain | >= 1.2 | 1.25 | 1.3 | 130 |  | 0.25 |" in lines
    assert any(line.startswith("| broken |") and "no/thing" in line for line in lines)
    assert "| lm_head | 3 |" in lines


def test_a_ratio_without_its_base_is_no_number() -> None:
    over = {"figure": "x.y", "over": "base"}
    assert measured_value(over, {"x": {"y": 2}}, {}) is None
    assert measured_value(over, {"x": {"y": 2}}, {"base": {"x": {"y": 4}}}) == 0.5
    assert measured_value({"figure": "x.y", "over": None}, {"x": None}, {}) is None


def test_a_command_that_outlives_its_limit_ends_with_all_it_started() -> None:
    start = time.monotonic()
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    done = python(["-c", endless], limit_s=1.0)
    assert done.status is None and time.monotonic() - start < 30
    assert done.failure is not None and "stopped after" in done.failure
    assert python(["-c", "raise SystemExit('why')"], limit_s=60.0).failure == "exit 1: why"


def test_a_stage_measures_what_it_can_and_leaves_out_what_was_there(tmp_path: Path) -> None:
    session = Session(Results(tmp_path / "results.jsonl"), stage_s=120.0, is_smoke=True, vllm=None)
    done, new, unknown, wrong = (Item(name, "llama-20m", "4", "2", 1000.0, roofline=False) for name in "abcd")
    unknown.settings["no_such_key"], wrong.settings["max_num_batched_tokens"] = 1, 1
    session.results.add("s", done.name, facts={"wall_s": 1.0})
    _measure(session, "s", [done, new, unknown, wrong])
    lines = {line["name"]: line for line in session.results.lines()}
    assert lines["a"]["facts"] == {"wall_s": 1.0}
    assert lines["b"]["facts"]["requests"] == 6 and lines["b"]["facts"]["settings"]["device"] == "cpu"
    assert "no key engine.no_such_key" in lines["c"]["skipped"]
    assert "max_num_batched_tokens: 1 is below" in lines["d"]["error"]


def test_vllm_is_asked_for_the_same_lengths_as_bulkrun_beside_it(tmp_path: Path) -> None:
    (tmp_path / "bench_vllm.py").write_text(
        "import json, sys\nprint(json.dumps({'total_tok_s': 5.0, 'arguments': sys.argv[1:]}))\n"
    )
    session = Session(Results(tmp_path / "results.jsonl"), stage_s=120.0, is_smoke=True, vllm=tmp_path)
    _measure(session, "vllm", beside_vllm()[:2])
    lines = {line["name"]: line["facts"] for line in session.results.lines()}
    asked = dict(zip(*2 * [iter(lines["vllm 1024/512, 1"]["arguments"])], strict=True))
    ours = lines["bulkrun 1024/512, 1"]
    names = {"--shape": "shape", "--input-len": "input_len", "--output-len": "output_len", "--num-requests": "requests"}
    assert {option: str(ours[name]) for option, name in names.items()}.items() <= asked.items()


def test_without_its_wheels_the_peer_is_left_out_by_name(tmp_path: Path) -> None:
    session = Session(Results(tmp_path / "results.jsonl"), stage_s=120.0, is_smoke=True, vllm=None)
    vllm(session)
    assert [line["skipped"] for line in session.results.lines()] == ["no --vllm: its wheels were not carried"]


def test_a_written_checkpoint_loads_and_its_bytes_are_those_of_its_weights(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, "llama-20m")
    checkpoint.drop_from_page_cache(tmp_path)
    seconds, num_bytes = checkpoint.read_all(tmp_path)
    assert seconds > 0 and 2 * 18.8e6 < num_bytes < 2 * 18.95e6
    done = python(["-m", "tests.benchmarks.gpu.checkpoint", "first-token", str(tmp_path), "cpu"], limit_s=120.0)
    facts = json.loads(done.stdout)
    assert 0 < facts["load_s"] < facts["first_token_s"]


@pytest.mark.parametrize("items", [targets_1(), targets_2(), ablations(), beside_vllm()])
def test_smoke_keeps_every_item_and_makes_it_tiny(items: list[Item]) -> None:
    small = smoke(items)
    assert [item.name for item in small] == [item.name for item in items]
    assert all(item.seconds < 1 and item.shape == "llama-20m" for item in small)
