"""Lines of OpenAI's batch format, judged by the official package's types."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion

from bulkrun.job.views.openai_lines import BatchLines, LineMaker

TOKEN = {"token_id": 5, "token": "Hi", "logprob": -0.5}
LOGPROBS = [{**TOKEN, "top": [TOKEN, {"token_id": 6, "token": "Ho", "logprob": -1.5}]}, {**TOKEN, "top": None}]


def row(number: int = 0, sample: int = 0, response: str | None = "Hi", code: str | None = None, **more: Any) -> Any:
    return {
        "row": number,
        "sample": sample,
        "response": response,
        "finish_reason": "error" if code else "stop",
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "error_code": code,
        "error_message": f"{code}: why" if code else None,
        "custom_id": f"id-{number}",
        **more,
    }


BOTH = {"thinking": {}, "logprobs": 1}


def lines(*rows: Any, id_column: str | None = "custom_id", sampling: dict[str, Any] = BOTH) -> list[BatchLines]:
    return list(LineMaker("run", "model", 1_700_000_000, id_column, sampling).lines(rows))


def test_a_chat_body_is_the_official_chat_completion() -> None:
    [(output, error)] = lines(row(url="/v1/chat/completions", logprobs=LOGPROBS, reasoning="Hm"))
    assert error is None and output is not None
    assert (output["custom_id"], output["error"], output["response"]["status_code"]) == ("id-0", None, 200)
    body = ChatCompletion.model_validate(output["response"]["body"], strict=True)
    assert body.object == "chat.completion" and body.model == "model"
    assert body.choices[0].message.content == "Hi" and body.choices[0].finish_reason == "stop"
    assert body.choices[0].logprobs is not None and body.choices[0].logprobs.content is not None
    assert [t.token for t in body.choices[0].logprobs.content[0].top_logprobs] == ["Hi", "Ho"]
    message = output["response"]["body"]["choices"][0]["message"]
    assert message["reasoning"] == message["reasoning_content"] == "Hm"
    assert body.usage is not None and body.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 4,
        "completion_tokens": 2,
        "total_tokens": 6,
    }


def test_tokens_of_a_chat_have_the_bytes_that_are_known() -> None:
    half = {"token": "\ufffd", "token_id": 9, "logprob": -1.0, "top": [{"token": "ü", "token_id": 8, "logprob": -2.0}]}
    [(output, _)] = lines(row(url="/v1/chat/completions", logprobs=[*LOGPROBS[:1], half]))
    assert output is not None
    content = ChatCompletion.model_validate(output["response"]["body"], strict=True).choices[0].logprobs
    assert content is not None and content.content is not None
    assert [token.bytes for token in content.content] == [[72, 105], None]
    assert [token.bytes for token in content.content[1].top_logprobs] == [[195, 188]]


def test_token_ids_stand_where_vllm_puts_them() -> None:
    two = [row(sample=sample, prompt_token_ids=[7, 8], token_ids=[sample]) for sample in range(2)]
    [(output, _)] = lines(*two, sampling={"return_token_ids": True})
    assert output is not None
    body = output["response"]["body"]
    assert body["prompt_token_ids"] == [7, 8] and [choice["token_ids"] for choice in body["choices"]] == [[0], [1]]
    [(output, _)] = lines({**two[1], "url": "/v1/completions"}, sampling={"return_token_ids": True})
    assert output is not None
    [choice] = output["response"]["body"]["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([7, 8], [1])


def test_log_probabilities_of_the_prompt_stand_where_vllm_puts_them_by_token_id() -> None:
    """The second token is not among the likeliest: nobody knows which place it has."""
    likeliest = {"token_id": 9, "token": " b", "logprob": -0.5}
    entries = [
        None,
        {**likeliest, "top": [likeliest]},
        {"token_id": 8, "token": "c", "logprob": -2.0, "top": [likeliest]},
    ]
    of_likeliest = {"9": {"logprob": -0.5, "rank": 1, "decoded_token": " b"}}
    want = [None, of_likeliest, {"8": {"logprob": -2.0, "rank": None, "decoded_token": "c"}, **of_likeliest}]
    for url, where in (
        ("/v1/chat/completions", lambda body: body),
        ("/v1/completions", lambda body: body["choices"][0]),
    ):
        [(output, _)] = lines(row(url=url, prompt_logprobs=entries), sampling={"prompt_logprobs": 1})
        assert output is not None and where(output["response"]["body"])["prompt_logprobs"] == want
        [(output, _)] = lines(
            row(url=url, prompt_logprobs=[None, {**likeliest, "top": None}]), sampling={"prompt_logprobs": 0}
        )
        assert output is not None
        [_, only] = where(output["response"]["body"])["prompt_logprobs"]
        assert only == {"9": {"logprob": -0.5, "rank": None, "decoded_token": " b"}}


def test_calls_are_those_of_the_official_chat_completion() -> None:
    calls = [{"id": "abc123xyz", "name": "f", "arguments": '{"x": 1}'}, {"id": "abc", "name": "g", "arguments": "{}"}]
    called = row(response=None, finish_reason="tool_calls", tool_calls=calls)
    [(output, error)] = lines(called, sampling={"tool_calls": {"format": "hermes"}})
    assert error is None and output is not None
    [choice] = ChatCompletion.model_validate(output["response"]["body"], strict=True).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert choice.message.tool_calls is not None
    assert [call.model_dump() for call in choice.message.tool_calls] == [
        {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": call["arguments"]}}
        for call in calls
    ]
    [(plain, _), (foreign, _)] = (*lines(row(tool_calls=None), sampling={"tool_calls": {}}), *lines(called))
    for other in (plain, foreign):  # no calls; and a column of that name that the input had
        assert other is not None and "tool_calls" not in other["response"]["body"]["choices"][0]["message"]


def test_a_completion_body_is_the_official_completion() -> None:
    [(output, _)] = lines(row(url="/v1/completions/", logprobs=LOGPROBS))
    assert output is not None
    body = Completion.model_validate(output["response"]["body"], strict=True)
    assert body.object == "text_completion" and body.choices[0].text == "Hi"
    assert body.choices[0].logprobs is not None and body.choices[0].logprobs.text_offset == [0, 2]
    assert body.choices[0].logprobs.top_logprobs == [{"Hi": -0.5, "Ho": -1.5}, {}]


def test_samples_are_choices_and_the_prompt_counts_once() -> None:
    [(output, _), (other, _)] = lines(row(0, 0), row(0, 1, "Ho"), row(1))
    assert output is not None and other is not None
    body = ChatCompletion.model_validate(output["response"]["body"], strict=True)
    assert [(choice.index, choice.message.content) for choice in body.choices] == [(0, "Hi"), (1, "Ho")]
    assert body.usage is not None and (body.usage.prompt_tokens, body.usage.completion_tokens) == (4, 4)
    assert output["id"] != other["id"]


@pytest.mark.parametrize(
    ("code", "status"),
    [("bad_input", 400), ("too_long", 400), ("empty_prompt", 400), ("engine_error", 500), ("timeout", 500)],
)
def test_a_failed_row_is_an_error_line_alone(code: str, status: int) -> None:
    [(output, error)] = lines(row(response=None, code=code))
    assert output is None and error is not None
    assert error["error"] == {"code": code, "message": f"{code}: why"}
    assert (error["custom_id"], error["response"]["status_code"]) == ("id-0", status)
    assert error["response"]["body"] == {
        "error": {"message": f"{code}: why", "type": code, "param": None, "code": code}
    }


def test_a_partial_text_is_in_the_error_line() -> None:
    [(output, error)] = lines(row(response="so fa", code="runaway"))
    assert output is None and error is not None
    assert error["response"]["body"]["choices"][0]["message"]["content"] == "so fa"


def test_a_row_with_good_and_failed_samples_is_in_both_files() -> None:
    [(output, error)] = lines(row(0, 0), row(0, 1, None, "timeout"), row(0, 2, "Ho"))
    assert output is not None and error is not None
    assert [choice["index"] for choice in output["response"]["body"]["choices"]] == [0, 2]
    assert error["error"]["message"] == "1 of 3 samples failed; sample 1: timeout: why"


def test_samples_that_failed_alike_are_told_once() -> None:
    [(_, same)] = lines(row(0, 0, None, "too_long"), row(0, 1, None, "too_long"))
    [(_, other)] = lines(row(0, 0, None, "timeout"), row(0, 1, None, "engine_error"))
    assert same is not None and same["error"]["message"] == "too_long: why"
    assert other is not None and other["error"]["message"] == "2 of 2 samples failed; sample 0: timeout: why"


def test_an_empty_answer_and_an_error_are_told_apart() -> None:
    (empty, _), (_, failed) = lines(row(0, response=""), row(1, response=None, code="engine_error"))
    assert empty is not None and empty["response"]["body"]["choices"][0]["message"]["content"] == ""
    assert failed is not None and failed["error"]["code"] == "engine_error"


def test_a_line_that_could_not_be_read_has_no_custom_id_and_a_run_without_ids_has_numbers() -> None:
    torn = row(7, response=None, code="bad_input", custom_id=None)
    assert [each.error["custom_id"] for each in lines(torn) if each.error] == [None]
    assert [each.error["custom_id"] for each in lines(torn, id_column=None) if each.error] == ["7"]


@pytest.mark.parametrize("id_column", ["custom_id", "logprobs"])
def test_columns_of_the_input_are_not_taken_for_the_models(id_column: str) -> None:
    given = row(logprobs=0.5, prompt_logprobs=7, reasoning="the input's", token_ids=[1], prompt_token_ids=[1])
    of_job = {"thinking": None, "logprobs": None, "return_token_ids": False}
    [(output, _)] = lines(given, id_column=id_column, sampling=of_job)
    assert output is not None and output["custom_id"] == str(given[id_column])
    [choice] = output["response"]["body"]["choices"]
    assert (
        choice["logprobs"] is None
        and not choice["message"].keys() & {"reasoning", "reasoning_content"}
        and "token_ids" not in choice
    )
    assert not output["response"]["body"].keys() & {"prompt_token_ids", "prompt_logprobs"}
    [(output, _)] = lines(row(logprobs=LOGPROBS), sampling={"logprobs": 0})
    assert output is not None and output["response"]["body"]["choices"][0]["logprobs"] is not None
