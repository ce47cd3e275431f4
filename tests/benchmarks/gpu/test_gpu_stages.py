"""The script for the GPU, without one: what fits, what is left out, what a line and the report say."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.benchmarks.gpu import __main__ as gpu_script
from tests.benchmarks.gpu import checkpoint, fake_peer
from tests.benchmarks.gpu.__main__ import call_seconds
from tests.benchmarks.gpu.items import TRACE_S, Item, Prediction, ablations, beside_vllm, fitted, small, smoke, targets
from tests.benchmarks.gpu.processes import python
from tests.benchmarks.gpu.report import measured_value, report_parts
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.session import Session
from tests.benchmarks.gpu.simulated import at_asked_requests
from tests.benchmarks.gpu.stages import vllm
from tests.benchmarks.gpu.throughput import _by_engine, last_object, measure_items
from tests.benchmarks.gpu_ops import CASES, TINY


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def session(folder: Path, seconds: float = 120.0, peer: Path | None = None) -> Session:
    return Session(Results(folder / "results.jsonl"), time.monotonic() + seconds, is_smoke=True, vllm=peer)


def test_what_fits_runs_whole_and_what_does_not_waits_or_is_cut_as_far_as_it_may() -> None:
    whole, small = Item("a", "s", "600", "400", 10_000.0), Item("b", "s", "600", "400", 10_000.0, (), 400, least=100)
    assert whole.seconds == 300 and fitted([whole, small], 3600.0) == [whole, small]
    (cut,) = fitted([whole, small], 60.0)
    assert cut.name == "b" and 100 <= cut.num_requests < 400
    assert fitted([whole, small], 35.0) == [] and fitted([small], 60.0, is_loaded=True) == [small]
    assert fitted([whole], 400.0) == [whole] and fitted([whole], 400.0, pace=1.3) == []


@pytest.mark.parametrize(("start_s", "first_s", "with_it"), [(120, 270, "1024/1024"), (35, 250, "512/512")])
def test_two_calls_in_the_lease_hold_every_kind_of_target(start_s: int, first_s: int, with_it: str) -> None:
    """By the guesses: a slow start and a first call to its limit, and as it was."""
    assert fitted(small(), 0.4 * 270) == small()
    left = 900 - start_s - first_s - 10
    seconds = call_seconds(left, 1, is_warm=True)
    assert seconds + 20 <= 600 and seconds + 50 <= left
    done: list[Item] = []
    for group in _by_engine(targets()):
        done += (fit := fitted(group, seconds))
        seconds -= sum(item.seconds + 7 + TRACE_S * item.trace for item in fit) + 20 * bool(fit)
    assert seconds > 0
    *_, last = (number for number, item in enumerate(targets()) if item.name.endswith(with_it))
    assert {item.name for item in targets()[: last + 1]} <= {item.name for item in done}


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
    for items in (small(), targets(), ablations(), beside_vllm()):
        names = [item.name for item in items]
        assert len(set(names)) == len(names)
        assert {one.over for item in items for one in item.predictions} <= {None, *names}
    whole = {(item.name, one.over) for item in targets() for one in item.predictions if one.over}
    requests = {item.name: (item.num_requests, item.least) for item in targets()}
    assert all(requests[name] == requests[over] and not requests[name][1] for name, over in whole), "none is cut"


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
    lines = "\n".join(report_parts(results.lines())).splitlines()
    assert "| fp8 |  | total_tok_s over plain | >= 1.2 | 1.25 | 1.3 | 130 |  | 0.25 |" in lines
    assert any(line.startswith("| broken |") and "no/thing" in line for line in lines)
    assert "| lm_head | 3 |" in lines


def test_a_ratio_without_its_base_is_no_number() -> None:
    over = {"figure": "x.y", "over": "base"}
    assert measured_value(over, {"x": {"y": 2}}, {}) is None
    assert measured_value(over, {"x": {"y": 2}}, {"base": {"x": {"y": 4}}}) == 0.5
    assert measured_value({"figure": "x.y", "over": None}, {"x": None}, {}) is None


def test_the_end_of_what_is_printed_has_the_targets(tmp_path: Path) -> None:
    """12,000 characters come back."""
    results = Results(tmp_path / "results.jsonl")
    results.add("correct", "pytest -m gpu, bfloat16", facts={"summary": 80 * "="})
    for stage, items in (("small", small()), ("targets", targets()), ("ablations", ablations())):
        for item in items:
            results.add_item(stage, item, error=5000 * "x")
    parts = report_parts(results.lines())
    printed = "\n\n".join(reversed(parts))
    assert all(part in printed[-12_000:] for part in parts[:4])


def test_runs_that_took_longer_than_guessed_make_the_next_ones_guesses_longer(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    assert results.pace("a") == 1.0
    results.add("s", "1", facts={"shape": "a", "wall_s": 30.0, "guessed_s": 20.0})
    assert results.pace("a") == 1.5 and results.pace("b") == 1.0


def test_fewer_requests_are_told_with_what_as_many_as_asked_would_have_given() -> None:
    facts = {
        "requests": 20, "input_len": "8", "output_len": "4", "shared_prefix": 0, "shape": "llama-20m", "kv": "bfloat16",
        "total_tok_s": 100.0, "share_of_serial": 0.5, "pool_blocks": 500, "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
    }  # fmt: skip
    lines = [
        {"stage": "targets", "name": name, "facts": facts | {"requests": n}} for name, n in (("a", 20), ("b", 3000))
    ]
    (row,) = [line for line in at_asked_requests(lines).splitlines() if line.startswith(("| a |", "| b |"))]
    faster, speed = (float(cell.replace(",", "")) for cell in row.split("|")[-3:-1])
    assert row.startswith("| a | 20 | 100 | 0.5 |") and faster > 1 and speed == pytest.approx(100 * faster, rel=0.01)


@pytest.mark.parametrize("family", CASES)
def test_every_op_that_is_timed_alone_runs_beside_its_rival(family: str) -> None:
    for case in CASES[family](TINY, "cpu"):
        assert case.run() is not None or case.name.startswith(("norm_rotary", "apply_token")), "these work in place"
        if case.rival is not None:
            case.rival()


def test_of_what_a_peer_prints_the_last_object_counts() -> None:
    assert last_object('{"a": 1}\n{"a": 2}\nWARNING: 3\n4\n') == {"a": 2}
    assert last_object("nothing\n") is None


def test_vllm_is_asked_for_the_same_lengths_as_ours_and_neither_has_a_prefix_cache(tmp_path: Path) -> None:
    fake_peer.write(tmp_path)
    call = session(tmp_path, seconds=300.0, peer=tmp_path)
    measure_items(call, "vllm", beside_vllm()[:2])
    lines = {line["name"]: line["facts"] for line in call.results.lines()}
    theirs, ours = lines["vllm 1024/512, 1"], lines["bulkrun 1024/512, 1"]
    asked = dict(zip(*2 * [iter(theirs["arguments"])], strict=True))
    names = {"--shape": "shape", "--input-len": "input_len", "--output-len": "output_len", "--num-requests": "requests"}
    assert {option: str(ours[name]) for option, name in names.items()}.items() <= asked.items()
    assert theirs["prefix_caching"] is ours["settings"]["enable_prefix_caching"] is False


def test_without_its_wheels_the_peer_is_left_out_by_name(tmp_path: Path) -> None:
    call = replace(session(tmp_path), is_smoke=False)
    vllm(call)
    assert [line["skipped"] for line in call.results.lines()] == ["no --vllm: its wheels were not carried"]


def test_a_written_checkpoint_loads_and_its_bytes_are_those_of_its_weights(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, "llama-20m")
    checkpoint.drop_from_page_cache(tmp_path)
    seconds, num_bytes = checkpoint.read_all(tmp_path)
    assert seconds > 0 and 2 * 18.8e6 < num_bytes < 2 * 18.95e6
    done = python(["-m", "tests.benchmarks.gpu.checkpoint", "first-token", str(tmp_path), "cpu"], limit_s=120.0)
    facts = json.loads(done.stdout)
    assert 0 < facts["load_s"] < facts["first_token_s"]


@pytest.mark.parametrize("items", [small(), targets(), ablations(), beside_vllm()])
def test_smoke_keeps_every_item_and_makes_it_tiny(items: list[Item]) -> None:
    small = smoke(items)
    assert [item.name for item in small] == [item.name for item in items]
    assert all(item.seconds < 1 and item.shape == "llama-20m" for item in small)
