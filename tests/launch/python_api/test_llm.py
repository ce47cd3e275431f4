"""`bulkrun.LLM` and `bulkrun.run_job`: what they answer is what a job answers, and no prompt is worth an exception."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import functools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import bulkrun
from bulkrun.errors import JobFileError, ModelError, UsageError
from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.launch.python_api import llm as module
from bulkrun.request import StructuredOutput, ToolCalls
from bulkrun.settings import EngineArgs
from tests.text.tool_templates import HERMES, TOOLS

SAMPLED = {"temperature": 0.8, "max_tokens": 6, "logprobs": 1}
PROMPTS = [f"def f{number}(x):" for number in range(12)]


@pytest.fixture(scope="module")
def llm() -> bulkrun.LLM:
    return bulkrun.LLM("bundled:tiny", max_num_seqs=4, dtype="float32")


def job(folder: Path, **sections: Any) -> dict[str, Any]:
    if not (folder / "rows.jsonl").exists():
        (folder / "rows.jsonl").write_text("".join(json.dumps({"text": prompt}) + "\n" for prompt in PROMPTS))
    return {
        "name": "python",
        "model": "bundled:tiny",
        "input": {"path": str(folder / "rows.jsonl")},
        "prompt": {"column": "text", "chat_template": "none"},
        "sampling": SAMPLED,
        "output": {"path": str(folder / "out")},
        "engine": {"dtype": "float32"},
        **sections,
    }


def test_the_docstrings_examples_are_true() -> None:
    assert doctest.testmod(module) == doctest.TestResults(0, 8)


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = "import bulkrun, sys; print(bulkrun.SamplingParams(), [m for m in ('torch', 'pyarrow') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip().endswith("[]")
    assert {"LLM", "run_job"} <= set(dir(bulkrun))
    with pytest.raises(AttributeError, match="nothing"):
        _ = bulkrun.nothing


def test_the_engine_settings_are_those_of_a_job_file() -> None:
    assert {*module.EngineSettings.__annotations__, "adapters"} == set(EngineSpec.model_fields)
    assert EngineArgs(**EngineSpec().model_dump(exclude={"adapters"})) == EngineArgs(), "with the same defaults"


def test_several_adapters_are_for_a_job() -> None:
    with pytest.raises(UsageError, match=r"adapters: an LLM has one for all prompts, adapter=; a job has several"):
        bulkrun.LLM("bundled:tiny", adapters={"a": "a"})  # type: ignore[call-arg]


def test_a_list_is_answered_as_a_job_answers_its_rows(llm: bulkrun.LLM, tmp_path: Path) -> None:
    seen: list[int] = []
    done = bulkrun.run_job(job(tmp_path), on_progress=lambda snapshot: seen.append(snapshot.rows_done))
    assert done.worked and done.totals.rows == len(PROMPTS) == seen[-1]
    rows = [row for part in sorted(done.run.root.glob("*.parquet")) for row in pq.read_table(part).to_pylist()]
    outputs = llm.generate(PROMPTS, SAMPLED)
    assert [output.text for output in outputs] == [row["response"] for row in sorted(rows, key=lambda row: row["row"])]
    first = min(rows, key=lambda row: row["row"])
    assert [entry["token_id"] for entry in first["logprobs"]] == list(outputs[0].token_ids)
    assert outputs[0].cumulative_logprob == pytest.approx(first["cumulative_logprob"], rel=1e-4)
    assert not bulkrun.run_job(job(tmp_path)).worked, "a finished run is left alone"


def test_run_job_in_another_thread_leaves_the_signals_alone(tmp_path: Path) -> None:
    before, results = signal.getsignal(signal.SIGTERM), []
    given = job(tmp_path, sampling={"max_tokens": 2}, run={"limit": 2})
    thread = threading.Thread(target=lambda: results.append(bulkrun.run_job(given)))
    thread.start()
    thread.join(120)
    assert [done.totals.rows for done in results] == [2]
    assert signal.getsignal(signal.SIGTERM) is before


def test_run_job_names_what_is_wrong_with_a_dictionary(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=r"sampling\.max_tokns.*max_tokens"):
        bulkrun.run_job(job(tmp_path, sampling={"max_tokns": 2}))
    with pytest.raises(JobFileError, match="no such file"):
        bulkrun.run_job(tmp_path / "nothing.yaml")
    for no_job in (None, [], b"job.yaml"):
        with pytest.raises(UsageError, match="is neither the path of a job file nor a mapping"):
            bulkrun.run_job(no_job)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"fresh": True, "resume_anyway": True}, "give only one of them"),
        ({"full_refresh": True}, "for jobs with run.incremental: true"),
    ],
)
def test_run_job_refuses_flags_that_contradict(flags: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        bulkrun.run_job(job(tmp_path), **flags)


def test_an_iterator_streams_and_equals_the_list(llm: bulkrun.LLM) -> None:
    whole = llm.generate(PROMPTS, SAMPLED)
    streamed = llm.generate(iter(PROMPTS), SAMPLED)
    assert isinstance(streamed, Iterator)
    assert [output.text for output in streamed] == [output.text for output in whole]
    as_they_end = list(llm.generate(iter(PROMPTS), SAMPLED, ordered=False))
    assert {output.index: output.text for output in as_they_end} == {o.index: o.text for o in whole}


def test_bad_prompts_are_outputs_with_an_error_and_good_ones_are_answered(llm: bulkrun.LLM) -> None:
    prompts: list[Any] = [
        "def f():",
        "",
        " \n",
        None,
        7,
        "\ud800",
        [1, "a"],
        [-1],
        [],
        [10**9],
        [2**70],
        [5] * 100_000,
        [5, 6],
    ]
    outputs = llm.generate(prompts, {"max_tokens": 2})
    codes = [output.error and output.error.code for output in outputs]
    want = ["empty_prompt"] * 2 + ["bad_input"] * 5 + ["empty_prompt", "bad_input", "bad_input", "too_long"]
    assert codes == [None, *want, None]
    assert all((output.error is None) == (output.text is not None) for output in outputs)


def test_bytes_are_no_token_ids(llm: bulkrun.LLM) -> None:
    (output,) = llm.generate([b"hello"], {"max_tokens": 2})  # type: ignore[list-item]
    assert output.error is not None
    assert output.error.code == "bad_input"


def test_prompts_may_be_values_of_pyarrow_and_numpy(llm: bulkrun.LLM) -> None:
    token_ids = [int(number) for number in np.arange(5, 12)]
    given = [
        "def close(self):",
        token_ids,
        pa.scalar("def close(self):"),
        np.array(token_ids),
        list(np.array(token_ids)),
        pa.array([token_ids])[0],
        {"prompt_token_ids": np.array(token_ids)},
    ]
    text, ids, *others = (output.token_ids for output in llm.generate(given, {"temperature": 0, "max_tokens": 3}))
    assert others == [text, ids, ids, ids, ids]
    floats, table = llm.generate([np.array([1.5]), np.array([[1, 2], [3, 4]])], {"temperature": 0, "max_tokens": 3})
    assert [output.error.code for output in (floats, table) if output.error] == ["bad_input", "bad_input"]


def test_sampling_may_hold_values_of_numpy_and_tuples(llm: bulkrun.LLM) -> None:
    own = {"max_tokens": np.int64(4), "temperature": np.float32(0.5), "seed": np.int64(7), "stop": ("zzz",)}
    plain = {"max_tokens": 4, "temperature": 0.5, "seed": 7, "stop": ["zzz"]}
    [one], [other] = llm.generate(["def f("], own), llm.generate(["def f("], plain)
    assert one.token_ids == other.token_ids


def test_a_model_is_not_sent_to_another_process(llm: bulkrun.LLM) -> None:
    with pytest.raises(UsageError, match="let each process make its own"):
        pickle.dumps(llm)


def test_one_stop_string_is_not_its_letters() -> None:
    assert bulkrun.SamplingParams(stop="file").stop == ("file",)


@pytest.mark.parametrize("temperature", [1e-38, 1e-40, 9e-6])
def test_as_good_as_no_temperature_is_greedy(llm: bulkrun.LLM, temperature: float) -> None:
    """Logits divided by so little are infinite in float32, and the first of those is not the likeliest."""
    params = {"max_tokens": 8, "seed": 3}
    prompts = ["The capital of France", "One two three"]
    cold = llm.generate(prompts, {**params, "temperature": temperature})
    assert [one.token_ids for one in cold] == [
        one.token_ids for one in llm.generate(prompts, {**params, "temperature": 0})
    ]


def test_bad_conversations_are_outputs_with_an_error(llm: bulkrun.LLM) -> None:
    conversations: list[Any] = [[{"role": "user", "content": "hello"}], "hello", [{"role": "user"}], [7], []]
    codes = [output.error and output.error.code for output in llm.chat(conversations, {"max_tokens": 2})]
    assert codes == [None, "bad_input", "bad_input", "bad_input", "empty_prompt"]


def test_conversations_may_be_values_of_pyarrow_and_of_pandas(llm: bulkrun.LLM) -> None:
    talk = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    other = [{"role": "assistant", "content": [{"type": "text", "text": "x"}], "name": "n"}]
    read = pa.array([talk, other])[0]
    as_pandas_has_it = np.array([{"role": "user", "content": np.array(talk[0]["content"]), "name": None}], dtype=object)
    outputs = llm.chat([talk, read, as_pandas_has_it, tuple(talk)], {"temperature": 0, "max_tokens": 3})  # type: ignore[list-item]
    assert [output.error for output in outputs] == [None] * 4
    assert len({output.prompt for output in outputs}) == 1


def test_one_conversation_needs_no_list_around_it(llm: bulkrun.LLM) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    [alone], [listed] = llm.chat(conversation, SAMPLED), llm.chat([conversation], SAMPLED)
    assert alone == dataclasses.replace(listed, num_cached_tokens=alone.num_cached_tokens)
    [message], [listed] = llm.chat(conversation[1], SAMPLED), llm.chat([conversation[1:]], SAMPLED)
    assert message == dataclasses.replace(listed, num_cached_tokens=message.num_cached_tokens)


def test_values_for_the_chat_template_reach_it(llm: bulkrun.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{{ messages[0].content }}{% if enable_thinking is false %} /no_think{% endif %}"
    monkeypatch.setattr(llm._tokenizer, "chat_template", source)
    conversation = [{"role": "user", "content": "hello"}]
    [plain] = llm.chat(conversation, {"max_tokens": 1})
    [short] = llm.chat(conversation, {"max_tokens": 1}, chat_template_kwargs={"enable_thinking": False})
    assert (plain.prompt, short.prompt) == ("hello", "hello /no_think")
    with pytest.raises(UsageError, match="chat_template_kwargs: add_generation_prompt cannot be set"):
        llm.chat(conversation, chat_template_kwargs={"add_generation_prompt": False})


def test_the_model_goes_on_with_the_last_message(llm: bulkrun.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Return the"}]
    going_on = functools.partial(llm.chat, add_generation_prompt=False, continue_final_message=True)
    short = {"temperature": 0, "max_tokens": 4}
    [continued] = going_on(chat, short)
    assert str(continued.prompt).endswith("assistant\nReturn the")
    assert continued.text == llm.generate([str(continued.prompt)], short)[0].text
    [unheaded] = llm.chat(chat, short, add_generation_prompt=False)
    assert str(unheaded.prompt).startswith(str(continued.prompt)) and not str(unheaded.prompt).endswith("assistant\n")
    bad = going_on([chat, chat[:1], [{**chat[1], "content": ""}], [*chat, {**chat[1], "content": " "}]], short)
    assert [output.error and output.error.code for output in bad] == [None, "bad_input", "empty_prompt", "bad_input"]
    assert "messages: continue_final_message: the last message has the role 'user'" in str(bad[1].error)
    with pytest.raises(UsageError, match="continue_final_message: needs add_generation_prompt=False beside it"):
        llm.chat(chat, continue_final_message=True)
    with pytest.raises(UsageError, match="add_generation_prompt: 'no' is not True or False"):
        llm.chat(chat, add_generation_prompt="no")  # type: ignore[call-overload]
    thoughts = {**short, "thinking": {}}
    [within] = going_on([chat[0], {**chat[1], "content": "<think>\nLet"}], thoughts)
    assert within.error is not None and (within.error.code, within.text) == ("no_answer", None) and within.reasoning
    [answering] = going_on(chat, {**thoughts, "structured_outputs": {"choice": [" yes"]}, "max_tokens": 40})
    assert (answering.text, answering.reasoning) == (" yes", None)


def test_tools_are_shown_and_called(llm: bulkrun.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm._tokenizer, "chat_template", HERMES)
    chat = functools.partial(llm.chat, [{"role": "user", "content": "hello"}])
    [free] = chat({"max_tokens": 2, "temperature": 0}, tools=TOOLS)
    assert (free.error, free.tool_calls, free.finish_reason) == (None, None, "length") and free.text
    assert '"name": "weather"' in str(free.prompt)
    for sampling in ({"max_tokens": 60}, bulkrun.SamplingParams(max_tokens=60)):
        [bound] = chat(sampling, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}})
        assert (bound.error, bound.text, bound.finish_reason) == (None, None, "tool_calls")
        [call] = bound.tool_calls or []
        assert call["name"] == "weather" and isinstance(json.loads(call["arguments"])["city"], str)
    [hidden] = chat({"max_tokens": 2, "temperature": 0}, tools=TOOLS, tool_choice="none")
    [plain] = chat({"max_tokens": 2, "temperature": 0})
    assert hidden.text == plain.text and "weather" not in str(hidden.prompt)
    left = {"max_tokens": 9, "temperature": 0, "tool_calls": {"format": "none"}, "structured_outputs": {"regex": "<a>"}}
    assert [output.text for output in chat(left, tools=TOOLS)] == ["<a>"], "for models that write calls otherwise"


def test_tools_that_cannot_be_called_are_refused(llm: bulkrun.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = functools.partial(llm.chat, [{"role": "user", "content": "hello"}])
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "strin"}}}
    for sampling in (None, bulkrun.SamplingParams()):
        with pytest.raises(JobFileError, match=r"none of the formats known here; set sampling\.tool_calls\.format"):
            chat(sampling, tools=TOOLS)
    monkeypatch.setattr(llm._tokenizer, "chat_template", HERMES)
    bound = bulkrun.SamplingParams(structured_outputs=StructuredOutput("regex", "a"))
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (None, {"tools": [7]}, "item 0: 7 is not"),
        (None, {"tools": 5}, "5 is not a list of tools"),
        (bulkrun.SamplingParams(tool_calls=ToolCalls("foo")), {"tools": TOOLS}, "'foo' is not one of hermes"),  # type: ignore[arg-type]
        (None, {"tools": TOOLS, "tool_choice": "always"}, "'always' is not auto"),
        (None, {"tool_choice": "required"}, "asks for a call, and the tools are: none"),
        (None, {"tools": [bad], "tool_choice": "required"}, "tools, tool_choice: .*strin"),
        (bound, {"tools": TOOLS}, "given together with structured_outputs"),
        (
            {"tool_calls": {"format": "none"}},
            {"tools": TOOLS, "tool_choice": "required"},
            "has to be called has a form",
        ),
    ]
    for sampling, options, match in wrong:
        with pytest.raises(UsageError, match=match):
            chat(sampling, **options)
    with pytest.raises(JobFileError, match="no room for calls"):
        chat({"structured_outputs": {"regex": "a"}}, tools=TOOLS)


def test_prompts_may_be_mappings_as_vllm_has_them(llm: bulkrun.LLM) -> None:
    from transformers import AutoTokenizer

    prompts: list[Any] = [
        "a b",
        {"prompt": "a b"},
        {"prompt_token_ids": [5, 6], "prompt": "words", "multi_modal_data": None},
        {"prompt_token_ids": [5, 6]},
        {"prompt": "a", "multi_modal_data": {"image": 1}},
        {},
        {"prompt": 7},
    ]
    outputs = llm.generate(prompts, {"temperature": 0, "max_tokens": 2})
    assert [output.prompt for output in outputs[:4]] == ["a b", "a b", "words", None]
    assert outputs[0].text == outputs[1].text and outputs[2].token_ids == outputs[3].token_ids
    words = tuple(AutoTokenizer.from_pretrained(BUNDLED_ROOT / "tiny")("a b")["input_ids"])
    assert [output.prompt_token_ids for output in outputs] == [words, words, (5, 6), (5, 6), (), (), ()]
    assert [output.error and output.error.code for output in outputs] == [None] * 4 + ["bad_input"] * 3
    assert "multi_modal_data" in str(outputs[4].error) and "nothing else" in str(outputs[4].error)
    assert llm.generate({"prompt": "a b"}, {"temperature": 0, "max_tokens": 2})[0].text == outputs[0].text


def test_the_models_length_means_as_many_as_fit(llm: bulkrun.LLM) -> None:
    whole = bulkrun.SamplingParams(max_tokens=llm.max_model_len, ignore_eos=True, temperature=0)
    [output] = llm.generate([[5] * (llm.max_model_len - 3)], whole)
    assert (output.finish_reason, output.num_output_tokens) == ("length", 3)


def test_a_bar_counts_the_outputs_in_a_terminal_and_nowhere_else(
    llm: bulkrun.LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(llm.generate(["a"] * 3, {"max_tokens": 1}, use_tqdm=True)) == 3
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert len(list(llm.generate(iter(["a"] * 3), {"max_tokens": 1}, use_tqdm=True))) == 3
    assert "3 prompts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "kind", "match"),
    [
        ({"n": 2}, TypeError, r"SamplingParams has no n: .*sampling\.n"),
        ({"best_of": 2}, TypeError, r"no best_of: .*sampling\.best_of"),
        ({"seed": 7}, TypeError, r'no seed: .*\{"seed": 7'),
        ({"max_tokens": None}, ValueError, r"max_tokens: None is not a whole number; LLM\.max_model_len"),
        ({"max_tokens": {"temperature": 0}}, ValueError, "max_tokens: {'temperature': 0} is not a whole number"),
        ({"max_tokens": 2.5}, ValueError, r"max_tokens: 2\.5 is not a whole number"),
        ({"top_k": 2.0}, ValueError, r"top_k: 2\.0 is not a whole number"),
        ({"logprobs": "3"}, ValueError, "logprobs: '3' is not a whole number"),
        ({"timeout_s": "5"}, ValueError, "timeout_s: '5' is not a number"),
        ({"stop": 5}, ValueError, "stop: 5 is not a text"),
        ({"stop": ["a", b"x"]}, ValueError, "stop: b'x' is not a text"),
        ({"stop_token_ids": [3.0]}, ValueError, r"stop_token_ids: 3\.0 is not a whole number"),
        ({"thinking": "x"}, ValueError, "thinking: 'x' is not a Thinking"),
        ({"repetition_stop": (1, 2, 3)}, ValueError, r"repetition_stop: \(1, 2, 3\) is not a RepetitionStop"),
        ({"temperature": "0.7"}, ValueError, "temperature: '0.7' is not a number"),
        ({"structured_outputs": {"choice": ["a"]}}, ValueError, r'\{"structured_outputs": \.\.\., \.\.\.\}'),
    ],
)
def test_what_vllm_takes_and_we_do_not_is_said_with_what_to_write(
    given: dict[str, Any], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        bulkrun.SamplingParams(**given)


def test_sampling_params_take_none_and_lists_for_stops_and_travel_whole() -> None:
    params = bulkrun.SamplingParams(stop=None, stop_token_ids=[3, 4], top_k=5)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids) == ((), (3, 4)) and hash(params)
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)


def test_each_prompt_may_have_sampling_of_its_own(llm: bulkrun.LLM) -> None:
    lengths = [1, 3, 2]
    own = [{"max_tokens": length, "ignore_eos": True} for length in lengths[:2]]
    outputs = llm.generate(["a b"] * 3, [*own, bulkrun.SamplingParams(max_tokens=2, ignore_eos=True)])
    assert [output.num_output_tokens for output in outputs] == lengths


def test_wrong_sampling_is_said_before_anything_runs(llm: bulkrun.LLM) -> None:
    for sampling, match in [
        ([{}], "1 of them for 2 prompts"),
        ({"temprature": 1}, "temperature"),
        ({"n": 3}, "run_job"),
        ({"return_token_ids": True}, "an output has its token_ids anyway"),
        ({"per_row": {"max_tokens": "m"}}, "a list of parameters, one for each prompt"),
        ({"top_k": 2**40}, "top_k"),
        ({"structured_outputs": {"regex": "("}}, "regex"),
        (5, "5 is neither SamplingParams nor a mapping"),
        ("hot", "'hot' is neither"),
        ([5, {}], "5 is neither"),
    ]:
        with pytest.raises(UsageError, match=match):
            llm.generate(["a", "b"], sampling)  # type: ignore[call-overload]
    for wrong in (7, "greedy", [7, 7], [{}, None]):
        with pytest.raises(UsageError, match="neither SamplingParams nor a mapping"):
            llm.generate(["a", "b"], wrong)  # type: ignore[call-overload]
    for nothing in (None, 7):
        with pytest.raises(UsageError, match="not a list or an iterator"):
            llm.generate(nothing)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match=r"'hello' is not .* of conversations"):
        llm.chat("hello")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="an iterator"):
        llm.generate(iter(["a"]), [{}])  # type: ignore[call-overload]


def test_a_model_is_a_name_or_a_path_and_a_seed_a_number() -> None:
    with pytest.raises(ModelError, match="nowhere"):
        bulkrun.LLM(Path("./nowhere"), seed=np.int64(7))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="seed: 'a' is not a whole number"):
        bulkrun.LLM("bundled:tiny", seed="a")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["task", "runner", "convert"])
def test_whoever_wants_vectors_is_told_whose_matter_they_are(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^{name}: an LLM writes text; bulkrun\.Embedder makes vectors"):
        bulkrun.LLM("bundled:tiny", **{name: "embed"})  # type: ignore[arg-type]


def test_a_forked_child_is_told_to_make_its_own(llm: bulkrun.LLM) -> None:
    streamed = llm.generate(iter(PROMPTS), SAMPLED)
    next(streamed)
    child = os.fork()
    if child == 0:
        said = 0
        for call in (lambda: llm.generate(["a"]), lambda: next(streamed)):
            try:
                call()
            except UsageError as error:
                said += "after os.fork()" in str(error)
        os._exit(40 + said)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    streamed.close()  # type: ignore[attr-defined]


def test_threads_may_share_a_model_and_get_what_each_would_alone(llm: bulkrun.LLM) -> None:
    greedy = {"temperature": 0, "max_tokens": 12}
    asked = [[f"def {name}{number}(x):" for number in range(20)] for name in "abcd"]
    talks = [[[{"role": "user", "content": prompt}] for prompt in prompts] for prompts in asked]
    alone = [
        [output.text for output in [*llm.generate(p, greedy), *llm.chat(t, greedy)]]
        for p, t in zip(asked, talks, strict=True)
    ]
    with ThreadPoolExecutor(8) as pool:
        said = [pool.submit(llm.generate, prompts, greedy) for prompts in asked]
        replied = [pool.submit(llm.chat, talk, greedy) for talk in talks]
        together = [[o.text for o in [*a.result(120), *b.result(120)]] for a, b in zip(said, replied, strict=True)]
    assert together == alone


def test_noise_depends_on_seed_and_position_only(llm: bulkrun.LLM) -> None:
    hot = {"temperature": 2.0, "max_tokens": 12}
    same = [output.text for output in llm.generate(["x = "] * 3, hot)]
    assert len(set(same)) == 3, "equal prompts get noise of their own"
    assert [output.text for output in llm.generate(["x = "] * 3, hot)] == same
    assert [output.text for output in llm.generate(["x = "] * 3, {**hot, "seed": 5})] != same


def test_an_output_in_circles_is_an_error_that_keeps_its_text(llm: bulkrun.LLM) -> None:
    circles = {"temperature": 0, "max_tokens": 200, "ignore_eos": True}
    stop = {"max_pattern": 8, "repeats": 4, "min_tokens": 16}
    [free] = llm.generate(["x = 1\n" * 20], circles)
    [stopped] = llm.generate(["x = 1\n" * 20], {**circles, "repetition_stop": stop})
    assert stopped.error is not None and stopped.error.code == "runaway" and stopped.finish_reason == "repetition"
    assert free.text is not None and stopped.text and free.text.startswith(stopped.text)
    assert stopped.num_output_tokens < free.num_output_tokens == 200


@pytest.mark.parametrize(
    ("structured", "stop", "text"),
    [
        ({"regex": "abcx?"}, {"stop": ["a"]}, None),
        ({"regex": "abcx?"}, {"stop": ["bc"]}, None),
        ({"regex": "abcx"}, {"stop": ["x"]}, None),
        ({"regex": "ab|abcdef"}, {"stop": ["cd"]}, "ab"),
        ({"grammar": 'start: "a" | "abc"'}, {"stop": ["bc"]}, "a"),
        ({"grammar": 'start: "abc"'}, {"stop_token_ids": list(range(5, 3000))}, None),
        ({"json": {"type": "integer", "minimum": 327000, "maximum": 327000}}, {"stop": ["0"]}, None),
        ({"choice": ["abc"]}, {"stop": ["c"]}, None),
    ],
)
def test_a_stop_is_the_end_of_a_structured_output_only_where_that_may_end(
    llm: bulkrun.LLM, structured: dict[str, Any], stop: dict[str, Any], text: str | None
) -> None:
    [output] = llm.generate(["say"], {"max_tokens": 30, "temperature": 0, "structured_outputs": structured, **stop})
    assert output.finish_reason == "stop"
    if text is None:
        assert output.error is not None
        assert output.error.code == "invalid_schema"
        assert "sampling.stop" in output.error.message
    else:
        assert (output.text, output.error) == (text, None)


def test_structured_output_is_parsed(llm: bulkrun.LLM) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False}
    outputs = llm.generate(PROMPTS, {"max_tokens": 30, "structured_outputs": {"json": schema}})
    for output in outputs:
        assert (output.error is None) == isinstance(output.parsed, dict)
        assert output.error is None or output.error.code == "invalid_schema"
    assert any(output.parsed in ({}, {"ok": True}, {"ok": False}) for output in outputs)
