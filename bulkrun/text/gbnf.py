"""Grammars in the words of llama.cpp and xgrammar (GBNF: `root ::= ...`), as in vLLM's examples, in Lark's.

Knows no parser but llguidance's own translator, and what that one does not take.
"""

from __future__ import annotations

import re
from collections import Counter

from llguidance.gbnf_to_lark import (
    AlternativeNode,
    ASTNode,
    GrammarParser,
    RegexNode,
    RepetitionNode,
    resolve,
)

_MAX_CHARACTERS = 32 * 2**10  # the translator takes a third of a second at this size, and grows with its square
_LARK = re.compile(r"^\s*(?:%llguidance\b|start\s*:(?!:=))", re.MULTILINE)
_RULE = re.compile(r"^[ \t]*([\w-]+)[ \t]*::=", re.MULTILINE)
_ROOT = re.compile(r"^([ \t]*)root(?=[ \t]*::=)", re.MULTILINE)
_WHOLE = "rOOt"  # what `root` is called: as long, for the places that messages name
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_CODE = re.compile(r'(?:"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[^#"\[])*')
_CONTROLS = {"0": 0x00, "b": 0x08, "v": 0x0B, "f": 0x0C}
_TRANSLATED = '"\\[]nrtxuU'  # the escapes that the translator reads, or knows to be cut short


def lark_of(grammar: str) -> str:
    """The grammar in Lark, as it is where it is that already. Raises ValueError for GBNF that cannot be read.

    Lark takes the longest text for each of its terminals, so that `[a-z]+ "x"` would fit nothing: what follows would
    have been taken. A grammar whose rules do not come back to themselves is one terminal here, and means what it says.
    """
    if _LARK.search(grammar) or _RULE.search(grammar) is None:
        return grammar
    if len(grammar) > _MAX_CHARACTERS:
        raise ValueError(f"has {len(grammar)} characters; as GBNF at most {_MAX_CHARACTERS} are possible, more as Lark")
    rules = _bars_at_the_end(_ESCAPE.sub(_readable, grammar))
    if _ROOT.search(rules) is None:
        raise ValueError("as GBNF: it has no rule `root`, the whole output")
    name, times = Counter(_RULE.findall(rules)).most_common(1)[0]
    if times > 1:
        raise ValueError(f"as GBNF: the rule `{name}` is there {times} times")
    try:
        parsed = GrammarParser().parse(_ROOT.sub(rf"\1{_WHOLE}", rules) + f"\nroot ::= {_WHOLE}\n")
        if "start" in parsed:
            raise ValueError("a rule cannot be called `start`, as Lark's whole output is")
        resolve(parsed)
        for rule in parsed.values():
            _amend(rule)
        return "\n".join(map(str, parsed.values()))
    except Exception as error:  # it raises just that, and IndexError where an escape is cut
        said = " ".join(str(error).replace(_WHOLE, "root").split())
        raise ValueError(f"as GBNF: {said}") from error


def _amend(node: ASTNode) -> None:
    """What the translator writes wrongly: `("a"+)?` is no `"a"+?`, and `.` is a newline too."""
    if isinstance(node, RegexNode) and node.rx == ".":
        node.rx = "(?s:.)"
    if isinstance(node, RepetitionNode) and isinstance(node.node, RepetitionNode):
        node.node = AlternativeNode([node.node])
    for child in node.children():
        _amend(child)


def _readable(escape: re.Match[str]) -> str:
    """An escape as the translator reads it: that has no names for some characters, and drops the zeros of \\u0041."""
    code, letter = escape[1] or escape[2], escape[3]
    if code is None and (letter in _TRANSLATED or (letter.isalnum() and letter not in _CONTROLS)):
        return escape[0]
    number = int(code, 16) if code is not None else _CONTROLS.get(letter, ord(letter))
    if not (number < 0xD800 or 0xDFFF < number < 0x110000):
        raise ValueError(f"as GBNF: {escape[0]} is no character")
    return f"\\x{number:02x}" if number < 0x80 else chr(number)


def _bars_at_the_end(rules: str) -> str:
    """What a line begins with `|` goes on: the translator wants the `|` at the end of the line before."""
    lines = re.split(r"\r?\n", rules)
    last = 0  # with anything but a comment
    for number, line in enumerate(lines):
        if line.lstrip().startswith("|") and number > 0:
            code, comment = _code_of(lines[last])
            lines[last], lines[number] = f"{code} | {comment}", line.replace("|", " ", 1)
        if _code_of(lines[number])[0].strip():
            last = number
    return "\n".join(lines)


def _code_of(line: str) -> tuple[str, str]:
    """A line up to its comment, and that."""
    code = _CODE.match(line)
    assert code is not None, "it may be empty"
    return code[0], line[code.end() :]
