"""The table for people (`examples/openai_batch.md`) and the tables of the code hold the same keys and values."""

from __future__ import annotations

import json
import re
from pathlib import Path

from bulkrun.job.prompts.body_keys import (
    BOTH,
    CHAT_ONLY,
    COMPLETION_ONLY,
    IGNORED,
    IGNORED_OF_RESPONSE,
    NEUTRAL,
    NEUTRAL_OF_EMBEDDING,
    NEUTRAL_OF_PAIRS,
    NEUTRAL_OF_RESPONSE,
    OF_EMBEDDING,
    OF_RERANK,
    OF_RESPONSE,
    OF_SCORE,
    RERANK_URLS,
    SCORE_URLS,
)
from bulkrun.job.prompts.response_items import ITEM_KINDS
from bulkrun.job.prompts.response_sections import OUTPUT_LOGPROBS

PAGE = (Path(__file__).parents[3] / "examples/openai_batch.md").read_text()
HONOURED_PART, NEUTRAL_PART, IGNORED_PART, RESPONSES_PART, EMBEDDING_PART, PAIRS_PART = PAGE.split("\n## ")[1:]
BY_ENDPOINT = "add_special_tokens"


def rows(part: str) -> list[tuple[list[str], str]]:
    """The keys and the other cell of each row of a table."""
    lines = [line.strip("|").split("|", 1) for line in part.splitlines() if line.startswith("| `")]
    return [(re.findall(r"`(\w+)`", keys), told.strip()) for keys, told in lines]


def test_every_key_that_is_honoured_is_told() -> None:
    told = [key for keys, _ in rows(HONOURED_PART) for key in keys]
    assert sorted(told) == sorted({*BOTH, *CHAT_ONLY, *COMPLETION_ONLY})


def test_every_value_that_asks_for_nothing_is_told() -> None:
    told = {key: json.loads(f"[{value}]") for keys, value in rows(NEUTRAL_PART) for key in keys if key != BY_ENDPOINT}
    want = {key: list(values) or [None] for key, values in NEUTRAL.items() if key not in CHAT_ONLY}
    assert told == want
    assert f"| `{BY_ENDPOINT}` |" in NEUTRAL_PART


def test_every_key_that_is_ignored_is_told() -> None:
    assert sorted(re.findall(r"`(\w+)`", IGNORED_PART)) == sorted(IGNORED)


def test_no_key_is_in_two_tables() -> None:
    known = [*BOTH, *COMPLETION_ONLY, *CHAT_ONLY, *IGNORED, *(key for key in NEUTRAL if key not in CHAT_ONLY)]
    assert len(known) == len(set(known))


def test_every_key_of_a_response_is_told() -> None:
    told = [key for keys, _ in rows(RESPONSES_PART) for key in keys]
    assert sorted(told) == sorted([*OF_RESPONSE, *NEUTRAL_OF_RESPONSE])
    values = {
        key: json.loads(f"[{value}]")
        for keys, value in rows(RESPONSES_PART)
        for key in keys
        if key in NEUTRAL_OF_RESPONSE
    }
    assert values == {key: list(values) or [None] for key, values in NEUTRAL_OF_RESPONSE.items()}
    [ignored] = re.findall(r"Ignored are the keys above and (.*?)\. Each", RESPONSES_PART)
    assert re.findall(r"`(\w+)`", ignored) == list(IGNORED_OF_RESPONSE)
    assert all(f"`{word}`" in RESPONSES_PART for word in (*ITEM_KINDS, OUTPUT_LOGPROBS))


def test_no_key_of_a_response_is_in_two_tables() -> None:
    known = [*OF_RESPONSE, *NEUTRAL_OF_RESPONSE, *IGNORED, *IGNORED_OF_RESPONSE]
    assert len(known) == len(set(known))


def test_every_key_of_an_embedding_is_told() -> None:
    assert [key for keys, _ in rows(EMBEDDING_PART) for key in keys] == list(OF_EMBEDDING)
    taken = re.findall(r"`(\w+)` (?:is taken )?at (\w+)", EMBEDDING_PART)
    assert {key: json.loads(value) for key, value in taken} == {
        key: values[0] if values else None for key, values in NEUTRAL_OF_EMBEDDING.items()
    }


def test_every_key_of_pairs_is_told() -> None:
    told = [key for keys, _ in rows(PAIRS_PART) for key in keys]
    assert sorted({*told}) == sorted({*OF_SCORE, *OF_RERANK, *NEUTRAL_OF_PAIRS})
    values = {
        key: json.loads(f"[{value}]") for keys, value in rows(PAIRS_PART) for key in keys if key in NEUTRAL_OF_PAIRS
    }
    assert values == {key: list(values) or [None] for key, values in NEUTRAL_OF_PAIRS.items()}
    assert all(f"`{url}`" in PAIRS_PART for url in (*SCORE_URLS, *RERANK_URLS))
