"""What the script for the GPU makes of commands that fail, hang or are killed, and of time that runs out."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.benchmarks.gpu import processes, throughput, workloads
from tests.benchmarks.gpu.items import Item, smoke, targets
from tests.benchmarks.gpu.processes import python
from tests.benchmarks.gpu.results import UNENDED, Results
from tests.benchmarks.gpu.session import Session
from tests.benchmarks.gpu.stages import _run_tests, ops
from tests.benchmarks.gpu.test_gpu_stages import session
from tests.benchmarks.gpu.throughput import measure_items


def test_a_command_that_outlives_its_limit_ends_with_all_it_started() -> None:
    start = time.monotonic()
    endless = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    done = python(["-c", endless], limit_s=1.0)
    assert done.status is None and time.monotonic() - start < 30
    assert done.failure is not None and "stopped after" in done.failure
    assert python(["-c", "raise SystemExit('why')"], limit_s=60.0).failure == "exit 1: why"


def test_a_stage_measures_what_it_can_and_leaves_out_what_was_there(tmp_path: Path) -> None:
    call = session(tmp_path)
    done, new, unknown, wrong = (Item(name, "llama-20m", "4", "2", 1000.0, roofline=False) for name in "abcd")
    unknown.settings["no_such_key"], wrong.settings["max_num_batched_tokens"] = 1, 1
    call.results.add("s", done.name, facts={"wall_s": 1.0})
    measure_items(call, "s", [done, new, unknown, wrong])
    lines = {line["name"]: line for line in call.results.lines()}
    assert lines["a"]["facts"] == {"wall_s": 1.0}
    assert lines["b"]["facts"]["requests"] == 6 and lines["b"]["facts"]["settings"]["device"] == "cpu"
    assert "no key engine.no_such_key" in lines["c"]["skipped"]
    assert "max_num_batched_tokens: 1 is below" in lines["d"]["error"]
    assert {"pool_blocks", "preemptions", "captured_graphs", "max_num_seqs"} <= lines["b"]["facts"].keys()
    assert "max_num_batched_tokens: 1 is below" in (tmp_path / "log.txt").read_text()


def test_what_fails_ends_its_process_and_the_next_items_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def process(call: Session, stage: str, items: list[Item]) -> str | None:
        calls.append([item.name for item in items])
        if items[0].name == "killed":
            return "exit -9: "
        call.results.add_item(stage, items[0], facts={"wall_s": 1.0})
        if len(items) == 1:
            return None
        call.results.add_item(stage, items[1], error="Traceback")
        return "exit 1: Traceback"

    monkeypatch.setattr(throughput, "_run_ours", process)
    call = session(tmp_path)
    measure_items(call, "s", [Item(name, "s", "4", "2", 1000.0) for name in ("good", "bad", "killed", "last")])
    assert calls == [["good", "bad", "killed", "last"], ["killed", "last"], ["last"]]
    assert {line["name"]: "facts" in line for line in call.results.lines()} == {
        "good": True, "bad": False, "killed": False, "last": True,
    }  # fmt: skip


def test_what_a_killed_process_was_at_is_told_and_a_third_engine_that_does_not_come_up_not_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    def process(call: Session, stage: str, items: list[Item]) -> str | None:
        calls.append([item.name for item in items])
        if items[0].name != "good":
            return "exit 1: no engine"
        call.results.add_item(stage, items[0], error=UNENDED)
        call.results.add_item(stage, items[0], facts={"wall_s": 1.0})
        call.results.add_item(stage, items[1], error=UNENDED)
        return "exit -9: "

    monkeypatch.setattr(throughput, "_run_ours", process)
    call = session(tmp_path)
    names = ["good", "killed", "no engine", "no other", "no third"]
    measure_items(call, "s", [Item(name, "s", "4", "2", 1000.0) for name in names])
    assert calls == [names, names[2:], names[3:]]
    lines = {line["name"]: line for line in call.results.lines()}
    assert "facts" in lines["good"] and lines["killed"]["error"] == "exit -9: "
    assert lines["no other"]["error"] == "exit 1: no engine"
    assert "did not come up" in lines["no third"]["skipped"]


def test_what_hangs_ends_its_process_and_says_where() -> None:
    hanging = "import time\nfrom tests.benchmarks.gpu.workloads import _at_most\nwith _at_most(0.2): time.sleep(60)"
    done = python(["-c", hanging], limit_s=60.0)
    assert done.status == 1 and done.seconds < 50
    assert (
        done.failure is not None and done.failure.startswith("it hung: Timeout (0:00:00.2") and "line 3" in done.failure
    )


def test_a_result_is_written_before_its_trace_and_a_failure_with_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no profiler")

    results = Results(tmp_path / "results.jsonl")
    (traced,) = smoke([Item("traced", "s", "4", "2", 1000.0, trace=True)])
    monkeypatch.setattr(workloads, "traced_facts", broken)
    with pytest.raises(RuntimeError):
        workloads.measure("s", [traced], results, 600.0)
    (line,) = results.lines()
    assert line["facts"]["total_tok_s"] > 0 and "broken" in line["facts"]["trace_error"]
    monkeypatch.setattr(workloads, "_facts", broken)
    with pytest.raises(RuntimeError):
        workloads.measure("s", [traced], results, 600.0)
    assert "no profiler" in results.lines()[0]["error"]


def test_what_there_is_no_time_for_is_not_begun_and_a_line_says_so(tmp_path: Path) -> None:
    call = session(tmp_path, seconds=30.0)
    measure_items(call, "targets", targets()[:1])
    ops(call)
    assert ["unmeasured" in line["skipped"] for line in call.results.lines()] == [True, True]


def test_a_file_of_tests_that_cannot_be_imported_leaves_the_others(tmp_path: Path) -> None:
    """As one that names what another version of transformers has, which the device machine has not."""
    (tmp_path / "test_broken.py").write_text("from json import no_such_name\n")
    (tmp_path / "test_whole.py").write_text("import pytest\n\n@pytest.mark.gpu\ndef test_it(): pass\n")
    call = session(tmp_path)
    _run_tests(call, "all", [str(tmp_path)], call.end)
    (line,) = call.results.lines()
    assert line["facts"]["num_passed"] == 1 and not line["facts"]["passed"]
    assert any("test_broken.py" in told for told in line["facts"]["failed"])


def test_tests_for_which_no_time_is_left_are_not_begun(tmp_path: Path) -> None:
    """The rest of the call is for numbers."""
    call = session(tmp_path)
    _run_tests(call, "all", [str(tmp_path)], time.monotonic() + 5)
    assert "unmeasured" in call.results.lines()[0]["skipped"]


def test_the_log_has_all_that_was_printed_up_to_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LOG_CHARACTERS", 1000)
    log = tmp_path / "log.txt"
    done = python(["-c", "import sys; sys.stderr.write('first' + 5000 * '.' + 'last'); print('out')"], 60.0, log=log)
    assert len(done.stderr) == 5009 and done.stdout == "out\n"
    python(["-c", "import sys; print('second', file=sys.stderr)"], 60.0, log=log)
    text = log.read_text()
    assert len(text) < 1500
    assert {text.count(word) for word in ("first", "last", "second")} == {2}, "each command and what it printed"
