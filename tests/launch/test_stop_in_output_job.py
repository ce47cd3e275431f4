"""Texts that keep their stop, and outputs that go on after their end, on the bundled model: in a job, in columns, in
OpenAI's lines, from Python. Oracle: the text of the same greedy output that nothing stops."""

from __future__ import annotations

import json
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
KEEP = "include_stop_str_in_output"
Submit = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(BUNDLED_ROOT / "tiny")


@pytest.fixture(scope="module")
def llm() -> bulkrun.LLM:
    return bulkrun.LLM("bundled:tiny", dtype="float32", max_num_seqs=4)


@pytest.fixture(scope="module")
def free(llm: bulkrun.LLM) -> str:
    """What the model says where nothing stops it, three words."""
    [output] = llm.chat([[{"role": "user", "content": PROMPT}]], {"temperature": 0, "max_tokens": 24})
    assert output.text is not None and len(output.text.split()) == 3
    return output.text


@pytest.fixture
def submit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Submit:
    monkeypatch.chdir(tmp_path)

    def run(rows: list[dict[str, Any]], exit_code: int = 0, **sections: Any) -> list[tuple[Any, ...]]:
        Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        sampling = {"max_tokens": 24, "temperature": 0, **sections.pop("sampling", {})}
        job = {"name": "stop", "model": "bundled:tiny", "input": {"path": "rows.jsonl"}, "sampling": sampling}
        job |= {"output": {"path": "out"}, "engine": {"dtype": "float32"}, **sections}
        Path("job.yaml").write_text(yaml.safe_dump(job))
        with one_process(own_engine):
            done = CliRunner().invoke(main, ["submit", "job.yaml"], catch_exceptions=False)
        assert done.exit_code == exit_code, done.output
        columns = "response, finish_reason, completion_tokens, error_message"
        return duckdb.sql(f"SELECT {columns} FROM 'out/*.parquet' ORDER BY row, sample").fetchall()

    return run


def stop_of(text: str) -> str:
    """The end of its second word: a text that begins inside a token."""
    return text.split()[1][-2:]


def up_to(text: str, stop: str) -> str:
    return text[: text.index(stop) + len(stop)]


def test_a_jobs_texts_keep_their_stop_and_a_column_may_say_otherwise(submit: Submit, free: str) -> None:
    stop = stop_of(free)
    rows: list[dict[str, Any]] = [{"keep": None}, {"keep": False}, {"keep": True}]
    sampling = {"stop": stop, KEEP: True, "n": 2, "best_of": 3, "per_row": {KEEP: "keep"}}
    done = submit(rows, prompt={"template": PROMPT}, sampling=sampling)
    texts = [text for text, *_ in done]
    whole = up_to(free, stop)
    assert texts == [whole, whole, whole.removesuffix(stop), whole.removesuffix(stop), whole, whole]
    assert {(reason, count) for _, reason, count, _ in done} == {("stop", done[0][2])}, "the tokens are the same"


def test_lines_keep_their_stop_and_go_on_after_their_end(submit: Submit, free: str, tokenizer: Tokenizer) -> None:
    stop = stop_of(free)
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    asks = {"/v1/chat/completions": chat, "/v1/responses": {"input": PROMPT}, "/v1/completions": {"prompt": PROMPT}}
    own: list[dict[str, Any]] = [{"stop": [stop]}, {"stop": [stop], KEEP: True}]
    lines = [{"url": url, "body": {**ask, **one}} for url, ask in asks.items() for one in own]
    unending = {"stop_token_ids": [], "ignore_eos": True, "logit_bias": {str(tokenizer.eos_token_id): 100}}
    lines += [{"url": "/v1/chat/completions", "body": {**chat, **unending, "ignore_eos": on}} for on in (False, True)]
    done = submit([{"custom_id": str(n), **line} for n, line in enumerate(lines)])
    texts = [text for text, *_ in done]
    for bare, kept in (texts[:2], texts[2:4]):
        assert (bare, kept) == (up_to(free, stop).removesuffix(stop), up_to(free, stop))
    bare, kept = texts[4:6]
    assert kept in (bare, bare + stop), "a plain prompt may end before the stop comes"
    assert [(reason, count) for _, reason, count, _ in done[6:]] == [("stop", 1), ("length", 24)]


def test_from_python_with_the_stop_string_or_token(llm: bulkrun.LLM, free: str, tokenizer: Tokenizer) -> None:
    chats = [[{"role": "user", "content": PROMPT}]]
    stop, [token_ids] = stop_of(free), tokenizer.encode_batch([free], False)
    [kept] = llm.chat(chats, bulkrun.SamplingParams(max_tokens=24, temperature=0, stop=stop, **{KEEP: True}))
    assert (kept.text, kept.finish_reason) == (up_to(free, stop), "stop")
    greedy = {"max_tokens": 24, "temperature": 0, "logprobs": 0, "stop_token_ids": [token_ids[3]]}
    [bare], [kept] = llm.chat(chats, greedy), llm.chat(chats, {**greedy, KEEP: True})
    assert bare.text is not None and kept.text == bare.text + tokenizer.decode_batch([[token_ids[3]]])[0]
    assert free.startswith(kept.text) and (kept.token_ids, kept.logprobs) == (bare.token_ids, bare.logprobs)


def test_a_structured_output_may_end_with_its_stop(llm: bulkrun.LLM) -> None:
    bound = {
        "temperature": 0,
        "max_tokens": 40,
        "structured_outputs": {"regex": r"[a-z]{4,9}\]( [a-z]+)?"},
        "stop": "]",
    }
    [cut], [whole] = llm.generate([PROMPT], bound), llm.generate([PROMPT], {**bound, KEEP: True})
    assert cut.error is not None and cut.error.code == "invalid_schema"
    assert whole.error is None and whole.text == f"{cut.text}]"
