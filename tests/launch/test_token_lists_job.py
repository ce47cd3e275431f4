"""Forbidden words and allowed tokens on the bundled model: in a job, in columns, in OpenAI's lines, from Python."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml
from click.testing import CliRunner

import bulkrun
from bulkrun.cli import main
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.text.tokenizer import Tokenizer
from tests.launch.one_process import one_process, own_engine

PROMPT = "Summarize this Python code in one sentence:\ndef close(self):\n    self.file.close()"
WORDS = ["Return", "the", "file"]
JOB = {
    "name": "words",
    "model": "bundled:tiny",
    "input": {"path": "rows.jsonl", "columns": ["name"]},
    "prompt": {"template": PROMPT + "{{ name }}"},
    "sampling": {"max_tokens": 24, "temperature": 0.8, "n": 2},
    "output": {"path": "out"},
    "engine": {"dtype": "float32"},
}
Submit = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(BUNDLED_ROOT / "tiny")


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    monkeypatch.chdir(tmp_path)

    def run(rows: list[dict[str, Any]], exit_code: int = 0, **sections: Any) -> list[tuple[Any, ...]]:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = {**JOB, **sections, "sampling": {**JOB["sampling"], **sections.get("sampling", {})}}
        Path("job.yaml").write_text(yaml.safe_dump({key: value for key, value in job.items() if value is not None}))
        with one_process(own_engine):
            done = CliRunner().invoke(main, ["submit", "job.yaml"], catch_exceptions=False)
        assert done.exit_code == exit_code, done.output
        if exit_code == 2:
            return [(done.output,)]
        columns = "row, response, finish_reason, error_code, error_message"
        return duckdb.sql(f"SELECT {columns} FROM '{job['output']['path']}/*.parquet' ORDER BY row, sample").fetchall()

    return run


def holds(text: str) -> bool:
    """Whole words: `files` is a token of its own."""
    return re.search(rf"\b({'|'.join(WORDS)})\b", text) is not None


def test_no_sample_of_a_job_holds_a_forbidden_word(submit: Submit) -> None:
    rows = [{"name": f"# {n}"} for n in range(12)]
    free = submit(rows)
    assert sum(holds(text) for _, text, *_ in free) > 12
    bound = submit(rows, sampling={"bad_words": WORDS}, output={"path": "bound"})
    assert len(bound) == len(free) == 24
    for _, text, _, code, _ in bound:
        assert code is None and text and not holds(text)


def test_rows_have_lists_of_their_own_and_a_bad_one_is_its_rows_error(submit: Submit, tokenizer: Tokenizer) -> None:
    yes, no = (tokenizer.encode_batch([text], False)[0][0] for text in (" yes", " no"))
    rows: list[dict[str, Any]] = [
        {"bad": WORDS, "only": None},
        {"bad": None, "only": [yes, no]},
        {"bad": [], "only": None},  # none of the job's
        {"bad": None, "only": []},
        {"bad": [""], "only": None},
        {"bad": None, "only": [4096]},
        {"bad": None, "only": [yes, "x"]},
    ]
    sampling = {
        "n": 1,
        "bad_words": ["Close"],
        "temperature": 0,
        "per_row": {"bad_words": "bad", "allowed_token_ids": "only"},
    }
    done = submit([{"name": "", **row} for row in rows], 3, sampling=sampling)
    texts, codes, messages = ([row[index] for row in done] for index in (1, 3, 4))
    assert not holds(texts[0]) and set(tokenizer.encode_batch([texts[1]], False)[0]) <= {yes, no}
    assert texts[2].startswith("Close")
    assert codes == [None, None, None, *["bad_input"] * 4]
    assert "column 'only' (sampling.allowed_token_ids): allowed_token_ids: an empty list" in messages[3]
    assert "column 'bad' (sampling.bad_words): ['']" in messages[4]
    assert "sampling.allowed_token_ids has token id 4096; the model's ids go from 0 to 4095" in messages[5]
    assert "column 'only' (sampling.allowed_token_ids):" in messages[6] and "'x' is not a whole number" in messages[6]


def test_lines_of_a_batch_have_lists_of_their_own(submit: Submit, tokenizer: Tokenizer) -> None:
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12, "temperature": 0}
    own = [{}, {"bad_words": WORDS}, {"allowed_token_ids": [40, 41]}, {"bad_words": None, "allowed_token_ids": None}]
    lines = [
        {"custom_id": f"r{n}", "url": "/v1/chat/completions", "body": {**asked, **one}} for n, one in enumerate(own)
    ]
    done = submit(lines, prompt=None, input={"path": "rows.jsonl"}, sampling={"n": 1})
    texts = [text for _, text, *_ in done]
    assert holds(texts[0]) and texts[3] == texts[0]
    assert texts[1] and not holds(texts[1])
    assert texts[2] == tokenizer.decode_batch([tokenizer.encode_batch([texts[2]], False)[0]])[0]
    assert done[2][2] == "length" and set(texts[2]) <= set("".join(tokenizer.decode_batch([[40], [41]])))


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        ({"allowed_token_ids": [5, 4096]}, "sampling.allowed_token_ids: 4096 is not a token id of the model"),
        ({"allowed_token_ids": []}, "sampling.allowed_token_ids: an empty list allows no token at all"),
        ({"bad_words": ["a", ""]}, "sampling.bad_words: ('a', '') is not free of empty strings"),
        ({"allowed_token_ids": [5], "logit_bias": {"7": 1}}, "sampling.logit_bias: token 7 is made likelier"),
    ],
)
def test_a_list_that_cannot_be_is_told_before_anything_runs(
    submit: Submit, sampling: dict[str, Any], problem: str
) -> None:
    [(told,)] = submit([{"name": ""}], 2, sampling=sampling)
    assert problem in told and not Path("out").exists()


def test_from_python_as_in_a_job(tokenizer: Tokenizer) -> None:
    llm = bulkrun.LLM("bundled:tiny", dtype="float32", max_num_seqs=4)
    chats = [[{"role": "user", "content": f"{PROMPT}# {n}"}] for n in range(6)]
    greedy = {"temperature": 0, "max_tokens": 16}
    assert any(holds(output.text or "") for output in llm.chat(chats, greedy))
    by_name = llm.chat(chats, {**greedy, "bad_words": WORDS})
    by_class = llm.chat(chats, bulkrun.SamplingParams(max_tokens=16, temperature=0, bad_words=WORDS))
    assert [output.text for output in by_name] == [output.text for output in by_class]
    assert not any(holds(output.text or "") for output in by_name)
    [sure] = llm.generate(
        [PROMPT],
        {"max_tokens": 1, "temperature": 0, "allowed_token_ids": [40, 41], "logprobs": 5, "logprobs_over": "allowed"},
    )
    chances = {entry["token_id"]: math.exp(entry["logprob"]) for entry in sure.logprobs[0]["top"]}
    assert chances.keys() == {40, 41} and sum(chances.values()) == pytest.approx(1, abs=1e-4)
    [none] = llm.generate([PROMPT], {**greedy, "allowed_token_ids": [342], "bad_words": ["the the"]})
    assert none.error is not None and none.error.code == "grammar_failed"
    assert none.text == " the" and "bad_words and allowed_token_ids: no token is left" in none.error.message


def test_tokens_that_a_job_returned_are_the_prompts_of_another(submit: Submit) -> None:
    """Prompts as another job had them, the same answers; with the answers behind them, the model goes on with those."""
    greedy = {"temperature": 0, "n": 1, "max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
    rows = [{"name": f" {name}"} for name in "ab"]
    whole = submit(rows, sampling={**greedy, "max_tokens": 12})
    submit(rows, sampling=greedy, output={"path": "first"})
    made = duckdb.sql("SELECT prompt_token_ids, token_ids FROM 'first/*.parquet' ORDER BY row").fetchall()
    again = [{"name": "", "ids": prompt} for prompt, _ in made]
    on = [{"name": "", "ids": prompt + written} for prompt, written in made]
    found = submit([*again, *on], prompt={"token_ids": "ids"}, sampling=greedy, output={"path": "second"})
    texts = [response for _, response, *_ in found]
    assert texts[:2] == [
        response
        for _, response, *_ in duckdb.sql("SELECT row, response FROM 'first/*.parquet' ORDER BY row").fetchall()
    ]
    assert [one + other for one, other in zip(texts[:2], texts[2:], strict=True)] == [text for _, text, *_ in whole]
    error = submit([{"name": "", "ids": [1, 4096]}], 3, prompt={"token_ids": "ids"}, output={"path": "third"})
    assert "token id 4096; the model's ids go from 0 to 4095" in error[0][4]
