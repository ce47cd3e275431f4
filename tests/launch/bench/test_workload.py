"""Requests of a benchmark: seeded, as long as asked for, and files that are wrong are refused by line."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest

from bulkrun.errors import InputError, UsageError
from bulkrun.launch.bench.throughput import Asked
from bulkrun.launch.bench.workload import (
    Lengths,
    Work,
    heavy_tailed_work,
    padded,
    poisson_arrivals,
    random_work,
    read_dataset,
)


def test_lengths_are_a_number_or_a_range_and_all_are_drawn() -> None:
    assert Lengths.parse("512", "--input-len") == Lengths(512, 512)
    work = random_work(200, Lengths.parse("2-4", "-"), Lengths(1, 2), shared_prefix=0, vocab_size=500)
    assert {len(one.prompt_token_ids) for one in work} == {2, 3, 4}
    assert {one.num_output_tokens for one in work} == {1, 2}


@pytest.mark.parametrize("text", ["", "0", "-3", "9-4", "1.5", "abc"])
def test_a_length_that_is_none_is_refused_by_option(text: str) -> None:
    with pytest.raises(UsageError, match="--output-len"):
        Lengths.parse(text, "--output-len")


def test_the_shared_prefix_comes_on_top_and_the_rest_differs() -> None:
    work = random_work(20, Lengths(5, 5), Lengths(3, 3), shared_prefix=7, vocab_size=1000)
    assert len({tuple(one.prompt_token_ids[:7]) for one in work}) == 1
    assert len({tuple(one.prompt_token_ids[7:]) for one in work}) == 20
    assert {len(one.prompt_token_ids) for one in work} == {12}
    assert all(100 <= token < 1000 for one in work for token in one.prompt_token_ids)


def test_the_requests_are_those_that_the_script_for_vllm_draws() -> None:
    """The same calls of the same generator in the same order, so that both engines get the same tokens."""
    rng = random.Random(0)
    head = [rng.randrange(100, 500) for _ in range(3)]
    expected = []
    for _ in range(20):
        prompt = head + [rng.randrange(100, 500) for _ in range(rng.randint(2, 9))]
        expected.append(Work(prompt, rng.randint(4, 6)))
    assert random_work(20, Lengths(2, 9), Lengths(4, 6), shared_prefix=3, vocab_size=500) == expected


def test_the_same_seed_is_the_same_work() -> None:
    first, second = (heavy_tailed_work(50, vocab_size=300, max_model_len=900) for _ in range(2))
    assert first == second
    assert first != heavy_tailed_work(50, vocab_size=300, max_model_len=900, seed=1)


def test_heavy_tailed_lengths_have_their_medians_and_fit_the_model() -> None:
    work = heavy_tailed_work(400, vocab_size=300, max_model_len=900)
    assert statistics.median(len(one.prompt_token_ids) for one in work) == pytest.approx(120, abs=2)
    assert statistics.median(one.num_output_tokens for one in work) == pytest.approx(80, abs=2)
    assert max(len(one.prompt_token_ids) + one.num_output_tokens for one in work) <= 900
    assert max(one.num_output_tokens for one in work) == 300

    odd = heavy_tailed_work(2001, vocab_size=300, max_model_len=4096)
    prompts, outputs = [len(one.prompt_token_ids) for one in odd], [one.num_output_tokens for one in odd]
    assert (statistics.median(prompts), max(prompts)) == (120, 1500)
    assert (statistics.median(outputs), max(outputs)) == (80, 600)


def test_padding_makes_each_batch_one_length_and_keeps_every_prompts_end() -> None:
    work = heavy_tailed_work(23, vocab_size=300, max_model_len=900)
    longer = padded(work, 5)
    for first in range(0, 23, 5):
        batch, originals = longer[first : first + 5], work[first : first + 5]
        assert {len(one.prompt_token_ids) for one in batch} == {max(len(one.prompt_token_ids) for one in originals)}
        assert {one.num_output_tokens for one in batch} == {max(one.num_output_tokens for one in originals)}
        for one, original in zip(batch, originals, strict=True):
            assert one.prompt_token_ids[-len(original.prompt_token_ids) :] == original.prompt_token_ids


def test_poisson_arrivals_have_their_rate() -> None:
    arrivals = poisson_arrivals(5000, rate=20.0)
    assert arrivals == sorted(arrivals)
    assert arrivals[0] < 0.5  # ten times a mean gap
    assert arrivals[-1] == pytest.approx(250, rel=0.05)
    gaps = [later - earlier for earlier, later in itertools.pairwise(arrivals)]
    assert statistics.stdev(gaps) == pytest.approx(0.05, rel=0.1)  # as much as their mean


def test_rows_with_ids_and_rows_with_text_become_requests_in_order(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [
        {"prompt": "ab", "max_tokens": 3},
        {"prompt_token_ids": [9, 8], "max_tokens": 1},
        {"prompt": "c", "max_tokens": 2, "more": None},
    ]
    path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    work = read_dataset(path, vocab_size=200, encode=lambda texts: [[ord(ch) for ch in text] for text in texts])
    assert work == [Work([97, 98], 3), Work([9, 8], 1), Work([99], 2)]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a list, not a JSON object"),
        ('{"prompt": ' + "[" * 100_000 + "]" * 100_000 + ', "max_tokens": 1}', "nested more than 100 deep"),
        ('{"prompt": "a"}', "a row is"),
        ('{"prompt": "a", "max_tokens": 0}', "a row is"),
        ('{"prompt": "a", "max_tokens": true}', "a row is"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "a row is"),
        ('{"prompt_token_ids": [1, "2"], "max_tokens": 1}', "a row is"),
        ('{"prompt_token_ids": [1, -2], "max_tokens": 1}', "a row is"),
        ('{"prompt_token_ids": [200], "max_tokens": 1}', "vocabulary of 200"),
        ('{"prompt": "a", "max_tokens": 1}', "no tokenizer"),
    ],
)
def test_a_row_that_cannot_be_asked_is_refused_by_file_and_line(line: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"prompt_token_ids": [1], "max_tokens": 1}\n' + line + "\n")
    with pytest.raises(InputError, match=f"d.jsonl:2: .*{why}"):
        read_dataset(path, vocab_size=200, encode=None)


def test_a_dataset_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        read_dataset(tmp_path / "none.jsonl", vocab_size=200, encode=None)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no rows"):
        read_dataset(tmp_path / "empty.jsonl", vocab_size=200, encode=None)


def test_lengths_are_refused_before_a_model_is_loaded() -> None:
    with pytest.raises(UsageError, match="--input-len"):
        Asked(input_len="abc")


def test_a_dataset_of_ids_needs_no_tokenizer_and_has_other_ids_with_another_seed(tmp_path: Path) -> None:
    rows = [{"prompt_token_ids": [5, 6, 7, 6], "max_tokens": 2}, {"prompt_token_ids": [5, 6, 98], "max_tokens": 1}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    loaded = SimpleNamespace(config=SimpleNamespace(vocab_size=100), tokenizer_of=tmp_path)
    asked = Asked(dataset=tmp_path / "d.jsonl")
    assert asked.work(loaded) == [Work([5, 6, 7, 6], 2), Work([5, 6, 98], 1)]
    assert asked.work(loaded, seed=3) == [Work([8, 9, 10, 9], 2), Work([8, 9, 1], 1)]


def test_a_length_beyond_the_model_is_refused_before_anything_is_drawn() -> None:
    loaded = SimpleNamespace(config=SimpleNamespace(vocab_size=99), engine=SimpleNamespace(max_model_len=4096))
    asked = Asked(input_len=f"1-{10**21}", output_len="5", num_requests=3)
    with pytest.raises(UsageError, match=r"1000000000000000000000 \+ 5 tokens are above max_model_len 4096"):
        asked.work(loaded)  # type: ignore[arg-type]


def test_a_small_vocabulary_has_tokens_too() -> None:
    work = heavy_tailed_work(20, vocab_size=60, max_model_len=90)
    assert {token for one in work for token in one.prompt_token_ids} == set(range(30, 60))
