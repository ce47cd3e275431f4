"""The parts of the comparison with other CPU engines that need no other engine."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from bulkrun.launch.bench.workload import read_dataset
from tests.benchmarks.cpu_peers import peer, runner
from tests.benchmarks.cpu_peers.__main__ import _without_workdir
from tests.benchmarks.cpu_peers.agreement import agree
from tests.benchmarks.cpu_peers.environments import Workplace, make_once
from tests.benchmarks.cpu_peers.results import ratios, summary, table
from tests.benchmarks.cpu_peers.runner import Comparison, last_json_line, run_in_turn
from tests.benchmarks.cpu_peers.workloads import make_workload
from tests.benchmarks.invoice import is_invoice, pattern
from tests.benchmarks.work import Work, longest_output_first, read_work, write_work

COMPARISON = Comparison("llama-20m", "small", "bfloat16", 2, ["bulkrun", "vllm"])


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes as tokens: enough text to cut, nothing to train."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return made


def _run(wall_s: float, *, cpu_s: float = 1.0, others: float = 0.0) -> dict[str, object]:
    times = {"wall_s": wall_s, "cpu_s": cpu_s, "others_cpu_share": others}
    sizes = {"output_tokens": 100, "total_tokens": 400, "load_s": 0.5, "peak_rss_mb": 10}
    return {**times, **sizes, "versions": {"engine": "1"}}


@pytest.mark.parametrize(("name", "count"), [("small", 64), ("medium", 256), ("short-output", 128)])
def test_workloads_have_the_lengths_of_the_table(tokenizer: Tokenizer, name: str, count: int) -> None:
    work = make_workload(name, tokenizer)
    prompts = [len(one.prompt_token_ids) for one in work]
    outputs = [one.num_output_tokens for one in work]
    assert len(work) == count
    assert statistics.median(prompts) == 128
    assert max(prompts) <= 1500
    if name == "short-output":
        assert set(outputs) == set(range(1, 9))
    else:
        assert (statistics.median(outputs), max(outputs)) == (80, 600)


def test_long_prompts_are_long(tokenizer: Tokenizer) -> None:
    work = make_workload("long-prompt", tokenizer)
    prompts, outputs = [len(one.prompt_token_ids) for one in work], [one.num_output_tokens for one in work]
    assert (len(work), max(prompts)) == (16, 3500)
    assert abs(statistics.median(prompts) - 2500) <= 50
    assert abs(statistics.median(outputs) - 60) <= 5


def test_a_shared_prefix_is_everybodys_and_what_follows_is_not(tokenizer: Tokenizer) -> None:
    prompts = [one.prompt_token_ids for one in make_workload("shared-prefix", tokenizer)]
    assert len({tuple(prompt[:600]) for prompt in prompts}) == 1
    assert len({tuple(prompt[:640]) for prompt in prompts}) > 1
    assert (statistics.median(map(len, prompts)), max(map(len, prompts))) == (650, 800)


def test_a_workload_is_the_same_every_time_and_no_text_comes_twice(tokenizer: Tokenizer) -> None:
    work = make_workload("medium", tokenizer)
    assert work == make_workload("medium", tokenizer)
    texts = [tuple(one.prompt_token_ids) for one in work if len(one.prompt_token_ids) > 100]
    assert len(set(texts)) == len(texts)


def test_the_files_are_datasets_of_bench_throughput(tmp_path: Path) -> None:
    work = [Work([5, 6, 7], 3), Work([8], 1)]
    write_work(tmp_path / "work.jsonl", work)
    assert read_work(tmp_path / "work.jsonl") == work
    assert read_dataset(tmp_path / "work.jsonl", vocab_size=10, encode=None) == work


def test_the_longest_output_comes_first() -> None:
    assert longest_output_first([Work([1], 2), Work([1], 9), Work([1], 5)]) == [1, 2, 0]


def test_first_alone_serves_one_request_before_the_others() -> None:
    calls = []

    def generate(work: list[Work]) -> list[list[int]]:
        calls.append(len(work))
        return [one.prompt_token_ids for one in work]

    work = [Work([i], 1) for i in range(4)]
    assert peer.serve(generate, work, first_alone=True) == [[0], [1], [2], [3]]
    assert peer.serve(generate, work, first_alone=False) == [[0], [1], [2], [3]]
    assert calls == [1, 3, 4]


def test_an_output_of_another_length_ends_the_run() -> None:
    with pytest.raises(SystemExit, match="request 1: 1 instead of 2"):
        peer.check_output_lengths([Work([1], 1), Work([1], 2)], [[1], [1]])


def test_a_peer_warms_up_with_other_prompts_and_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served: list[list[Work]] = []

    def load(options: peer.Options) -> peer.Generate:
        def generate(work: list[Work]) -> list[list[int]]:
            served.append(work)
            return [[0] * one.num_output_tokens for one in work]

        return generate

    work = [Work([1, 2, 3], 5), Work([4, 5], 2)]
    write_work(tmp_path / "work.jsonl", work)
    options = ["--model", "m", "--work", str(tmp_path / "work.jsonl"), "--dtype", "float32", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["peer", *options, "--tokens-out", str(tmp_path / "tokens.json")])
    peer.run_peer(load, "pytest")
    result = last_json_line(capsys.readouterr().out)
    assert (result["output_tokens"], result["total_tokens"]) == (7, 12)
    assert result["versions"] == {"pytest": pytest.__version__}
    assert json.loads((tmp_path / "tokens.json").read_text()) == [[0] * 5, [0] * 2]
    warm_up, timed = served
    assert timed == work
    assert not {tuple(one.prompt_token_ids) for one in warm_up} & {tuple(one.prompt_token_ids) for one in work}


def test_peers_import_nothing_of_ours_before_their_engine() -> None:
    """They run where bulkrun and torch may not be importable."""
    modules = [f"tests.benchmarks.cpu_peers.peer_{name}" for name in ("vllm", "openvino")]
    code = f"import sys, {', '.join(modules)}; print(*[m for m in ('bulkrun', 'torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=runner.REPOSITORY, capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("", "")


def test_the_result_is_the_last_json_line_of_what_a_library_prints() -> None:
    assert last_json_line('loading\n{"a": 1}\n{"b": 2}\nbye\n') == {"b": 2}


def test_peers_take_turns_and_a_failing_one_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []

    def run(place: Workplace, comparison: Comparison, name: str) -> dict[str, object] | None:
        turns.append(name)
        return None if name == "vllm" else _run(1.0)

    monkeypatch.setattr(runner, "run_peer_process", run)
    results = run_in_turn(Workplace(Path()), replace(COMPARISON, peers=["static", "vllm", "bulkrun"]), rounds=2)
    assert turns == ["static", "vllm", "bulkrun", "static", "bulkrun"]
    assert {name: len(runs) for name, runs in results.items()} == {"static": 2, "bulkrun": 2}


def test_weights_of_four_bits_are_the_same_checkpoint_however_inputs_are_rounded() -> None:
    place = Workplace(Path("w"))
    assert place.model("bulkrun", "llama-20m", "w4a8") == place.model("vllm", "llama-20m", "int4")
    assert place.model("openvino", "llama-20m", "w4a8") == place.model("openvino", "llama-20m", "int4")
    assert place.model("bulkrun", "llama-20m", "int8") == place.model("bulkrun", "llama-20m", "bfloat16")


def test_only_openvino_gets_the_shared_prefix_in_two_calls() -> None:
    place, shared = Workplace(Path("w")), replace(COMPARISON, workload="shared-prefix")
    assert "--first-alone" in list(runner._arguments(place, shared, "openvino"))
    assert "--first-alone" not in list(runner._arguments(place, shared, "vllm"))
    assert "--first-alone" not in list(runner._arguments(place, COMPARISON, "openvino"))


def test_a_summary_has_medians_and_the_worst_disturbance() -> None:
    one = summary([_run(3.0, cpu_s=5.0, others=0.01), _run(1.0, cpu_s=2.0, others=0.2), _run(2.0, cpu_s=4.0)])
    assert (one["median_wall_s"], one["median_cpu_s"], one["others_cpu_share"]) == (2.0, 4.0, 0.2)
    assert (one["output_tok_s"], one["total_tok_s"]) == (50.0, 200.0)


def test_ratios_say_how_many_times_as_fast_we_are() -> None:
    summaries = {"bulkrun": summary([_run(2.0)]), "static": summary([_run(10.0)]), "vllm": summary([_run(1.5)])}
    assert ratios(summaries) == {"static": 5.0, "vllm": 0.75}
    assert ratios({"static": summary([_run(10.0)])}) == {}


def test_the_table_starts_with_the_fastest_and_marks_disturbed_runs() -> None:
    summaries = {"static": summary([_run(10.0)]), "bulkrun": summary([_run(2.0, others=0.3)])}
    header, first, second = table(summaries).splitlines()
    assert header.split()[:2] == ["peer", "wall"]
    assert first.split()[:2] == ["bulkrun", "2.00"]
    assert first.endswith("30% busy")
    assert second.split()[0] == "static"
    assert "5.00" in first.split()


def test_an_invoice_has_the_names_and_kinds_of_the_schema() -> None:
    address = {"street": "5 High St", "postal_code": "12", "country_code": "DE"}
    invoice: dict[str, object] = {"invoice_number": "7", "customer_name": "", "billing_address": address}
    invoice |= {"total_amount": 90, "is_overdue": False, "payment_method": "credit_card"}
    text = json.dumps(invoice)
    assert re.fullmatch(pattern(), text)
    assert is_invoice(text)
    for change in ({"total_amount": True}, {"payment_method": "cash"}, {"billing_address": {}}, {"more": 1}):
        assert not is_invoice(json.dumps(invoice | change))
    assert not is_invoice(text[:-1])


def test_documents_are_asked_for_by_the_workload_and_end_by_themselves(tokenizer: Tokenizer, tmp_path: Path) -> None:
    structured = replace(COMPARISON, workload="structured")
    assert "--invoices" in list(runner._arguments(Workplace(Path("w")), structured, "vllm"))
    assert {one.num_output_tokens for one in make_workload("structured", tokenizer)} == {256}
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(SystemExit, match="1 of 1 outputs are no invoices"):
        peer.check_documents(tmp_path, [tokenizer.encode("{}").ids])


def test_agreement_counts_outputs_that_are_the_same_to_the_last_token() -> None:
    assert agree([[1, 2], [3, 4], [5]], [[1, 2], [3, 9], [5]]) == "2/3"


def test_what_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    made = []

    def fails(folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise OSError

    def works(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()

    with pytest.raises(OSError):
        make_once(tmp_path / "venv", fails)
    make_once(tmp_path / "venv", works)
    make_once(tmp_path / "venv", works)
    assert made == [tmp_path / "venv"]
    assert [path.name for path in tmp_path.iterdir()] == ["venv"]
    assert not (tmp_path / "venv" / "half").exists()


def test_history_holds_no_paths_of_the_machine() -> None:
    assert _without_workdir(["run", "--workdir", "/home/me", "--record"]) == ["run", "--workdir", "DIR", "--record"]
    assert _without_workdir(["run", "--workdir=/home/me"]) == ["run", "--workdir=DIR"]
