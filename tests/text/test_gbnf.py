"""Grammars in llama.cpp's words: what fits them, by `re` where they are regular; what is said of bad ones."""

from __future__ import annotations

import random
import re

import pytest

from bulkrun.request import StructuredOutput
from bulkrun.text.constraint import Grammars
from bulkrun.text.grammar import check_grammar
from bulkrun.text.tokenizer import Tokenizer
from tests.text import small_tokenizers

JSON = r"""
# values, with white space behind them
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws (
    string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws (value ("," ws value)*)? "]" ws
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\"" ws  # escapes
number ::= "-"? ([0-9] | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
BARS = """
  root ::= verb-phrase "."
  verb-phrase ::= "go"
    | "stay"

    # or
    | other   # with "more" | less
    | "a # b" # c
    | "d"
  other ::= ("run" | "walk") " " .+
"""


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    return Grammars(Tokenizer.from_dir(small_tokenizers.byte_level(tmp_path_factory.mktemp("tokenizer"))))


def fits(grammars: Grammars, grammar: str, text: str) -> bool:
    constraint = grammars.constraint(StructuredOutput("grammar", grammar))
    token_ids = grammars._tokenizer.encode_batch([text], False)[0] if text else []
    return all(constraint.accept(id_) is None for id_ in token_ids) and constraint.progress() in ("whole", "closed")


@pytest.mark.parametrize(
    ("grammar", "text", "is_one"),
    [
        (JSON, '{"a": [1, -2.5e+3, "\\u00e9\\n"], "b": {}}', True),
        (JSON, '{"a": 01}', False),
        (JSON, '{"a": "\n"}', False),
        (JSON, "[1]", False),
        (BARS, "go.", True),
        (BARS, "stay.", True),
        (BARS, "run off.", True),
        (BARS, "run.", False),
        (BARS, "a # b.", True),
        (BARS, "d.", True),
        ('root ::= "(" root ")" | "x"', "((x))", True),
        ('root ::= "(" root ")" | "x"', "((x)", False),
        ('root ::= [a-z]+ "x"', "abx", True),  # Lark's terminals would have taken the x as one more letter
        ('root ::= word "x"\nword ::= [a-z]+', "abxx", True),
        ('root ::= ("a"+)? ("b"{2})* ("c"?)+', "aabbbb", True),
        ('root ::= ("a"+)? ("b"{2})* ("c"?)+', "aabbb", False),
        ('root ::= "a # b"\n | "c"', "a # b", True),
        (r'root ::= "\u0041\U000000e9\x42\"\\"', 'AéB"\\', True),
        (r'root ::= "\U0001F389" [\u0430-\u044f\-\^\]/[]+', "🎉яа-^]/[", True),
        (r"root ::= [^\u0041\\]", "A", False),
        (r"root ::= [^\u0041\\]", "\\", False),
        (r'root ::= "\f\v\0\b\'\?" "\\u0041"', "\f\v\0\b'?\\u0041", True),
        ('root ::= rooted "root ::="\nrooted ::= "a"', "aroot ::=", True),
        ('Root ::= "a"\nroot ::= Root Noun-Phrase\nNoun-Phrase ::= "b"', "ab", True),
        ('root ::= "a"\r\n  | "b"\r\n', "b", True),
        ("root ::= . .", "a\n", True),
        ('start: "x" /::=/', "x::=", True),
        ('%llguidance {}\nstart: "a"\n// root ::= "b"', "a", True),
    ],
)
def test_what_fits_a_grammar(grammars: Grammars, grammar: str, text: str, is_one: bool) -> None:
    check_grammar(StructuredOutput("grammar", grammar))
    assert fits(grammars, grammar, text) is is_one


def _at_random(choose: random.Random, depth: int) -> tuple[str, str, str]:
    """A grammar's rule, the same as a regex of Python's, and a text that fits it."""
    kind = choose.random()
    if depth == 0 or kind < 0.4:
        text = "".join(choose.choice('ab-]"\\') for _ in range(choose.randint(1, 2)))
        return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"', re.escape(text), text
    if kind < 0.6:
        names = {"a": "a", "b": "b", "a-b": "b", r"\]": "]", r"\\": "\\", r"\x62": "b"}
        chosen = [choose.choice([*names]) for _ in range(choose.randint(1, 2))]
        return f"[{''.join(chosen)}]", f"[{''.join(chosen)}]", names[chosen[0]]
    rules, regexes, texts = zip(*(_at_random(choose, depth - 1) for _ in range(choose.randint(1, 3))), strict=True)
    if kind < 0.8:
        return "(" + " | ".join(rules) + ")", "(?:" + "|".join(regexes) + ")", choose.choice(texts)
    often = {"": 1, "*": 0, "+": 2, "?": 1, "{2}": 2, "{1,2}": 1, "{1,}": 2}
    times = choose.choice([*often])
    return f"({' '.join(rules)}){times}", f"(?:{''.join(regexes)}){times}", "".join(texts) * often[times]


@pytest.mark.parametrize("seed", range(20))
def test_a_grammar_without_a_way_back_means_what_a_regex_does(grammars: Grammars, seed: int) -> None:
    choose = random.Random(seed)
    (rule, regex, text), (other, also, more) = _at_random(choose, 4), _at_random(choose, 3)
    grammar, pattern = f"root ::= part-a {other}\npart-a ::= {rule}", re.compile(f"(?:{regex})(?:{also})", re.DOTALL)
    assert pattern.fullmatch(text + more) and fits(grammars, grammar, text + more), grammar
    cut = [(text + more)[:end] for end in range(len(text + more))]
    for given in (*cut, *("".join(choose.choice('ab-]"\\') for _ in range(choose.randint(0, 6))) for _ in range(40))):
        assert fits(grammars, grammar, given) is (pattern.fullmatch(given) is not None), (grammar, given)


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        ('expr ::= "1"', "as GBNF: it has no rule `root`, the whole output"),
        ('root ::= "a" other', "as GBNF: Rule 'other' not found"),
        ('root ::= a\na ::= "x"\na ::= "y"', "as GBNF: the rule `a` is there 2 times"),
        ('\nroot ::= "a', "as GBNF: Unexpected end of input"),
        ('root ::= start\nstart ::= "x"', "as GBNF: a rule cannot be called `start`"),
        ("root ::= 'a'", "as GBNF: Expected name at line 1, 'root ::= ' ^ "),
        ('root ::= "\\q"', "as GBNF: Invalid escape sequence"),
        ('root ::= "\\', "as GBNF: "),
        ("root ::= " + "(" * 5000 + '"a"' + ")" * 5000, "as GBNF: maximum recursion depth"),
        ('root ::= "' + "a" * 40_000 + '"', "has 40011 characters; as GBNF at most 32768"),
        (r'root ::= "\ud83d"', r"as GBNF: \ud83d is no character"),
        (r'root ::= "\UFFFFFFFF"', r"as GBNF: \UFFFFFFFF is no character"),
    ],
)
def test_what_is_said_of_a_grammar_that_cannot_be_read(grammar: str, said: str) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        check_grammar(StructuredOutput("grammar", grammar))
    assert str(refused.value).startswith(said) and "\n" not in str(refused.value)
