"""Patterns of JSON schemas as regexes of whole texts: what fits the one fits the other."""

from __future__ import annotations

import json

import pytest

from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.request import StructuredOutput
from bulkrun.text.constraint import Grammars
from bulkrun.text.grammar import check_grammar
from bulkrun.text.text_pattern import regex_of_pattern
from bulkrun.text.tokenizer import Tokenizer

TEXTS = ["", "a", "b", "ab", "xa", "bx", "a/b", "12345", "123456", "a\nb", "a|b", "$", "a$", "^a", "]", "é", "(a", "A"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(BUNDLED_ROOT / "tiny")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer)


def fits(grammars: Grammars, tokenizer: Tokenizer, structured: StructuredOutput, text: str) -> bool:
    constraint = grammars.constraint(structured)
    [token_ids] = tokenizer.encode_batch([text], False)
    return all(constraint.accept(token) is None for token in token_ids) and constraint.progress() != "unfinished"


@pytest.mark.parametrize(
    "pattern",
    [
        *("a", "^a", "a$", "^a$", "^[0-9]{5}$", "^a|b$", "^(a|b)$", "^a$|^b$", "a/b", "^[^/]+$", "[|]", "\\|", "\\$"),
        *("", "^$", "^a\\$$", "[]a]", "[\\]]", "^\\^a$", "\\(a", "^a\\nb$", "^a.b$", "^a\nb$"),
    ],
)
def test_a_text_fits_the_regex_that_has_the_pattern(pattern: str, grammars: Grammars, tokenizer: Tokenizer) -> None:
    """llguidance's own reading of patterns, in the quotes of JSON, is the oracle."""
    schema = StructuredOutput("json", json.dumps({"type": "string", "pattern": pattern}))
    grammar = StructuredOutput("grammar", f'start: TEXT\nTEXT: "<" {regex_of_pattern(pattern)}')
    for text in TEXTS:
        wanted = fits(grammars, tokenizer, schema, json.dumps(text, ensure_ascii=False))
        assert fits(grammars, tokenizer, grammar, f"<{text}") == wanted, text


@pytest.mark.parametrize("pattern", ["(?=a)", "\\ba", "(^a$)", "(a", "(?i)^a", "a^b"])
def test_what_looks_around_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="regex"):
        check_grammar(StructuredOutput("grammar", f"start: TEXT\nTEXT: {regex_of_pattern(pattern)}"))
