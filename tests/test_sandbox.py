"""Templates that try to hurt the process, and ordinary ones that must not notice the guard."""

from __future__ import annotations

import resource
import threading
import time
from typing import Any

import jinja2
import pytest

from bulkrun.sandbox import Sandbox, TemplateFailed

GROW = "{%% set ns = namespace(s='xxxxxxxx', l=[1]) %%}{%% for i in range(64) %%}%s{%% endfor %%}"
SHARED = (
    "{%% set n = namespace(a=(1, 1), b=(1, 1)) %%}{%% for i in range(40) %%}{%% set n.a = %s %%}{%% set n.b = %s %%}"
    "{%% endfor %%}"
)
LISTS, TUPLES = SHARED % ("[n.a, n.a]", "[n.b, n.b]"), SHARED % ("(n.a, n.a)", "(n.b, n.b)")
BOMBS = {
    "nested loops that put nothing out": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}"
    "{% endfor %}",
    "a loop's filter": "{% for a in range(100000) if range(100000)|sum < 0 %}{% endfor %}",
    "macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "macro without end": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "string times number": "{{ 'x' * 300000000 }}",
    "number times string": "{{ 300000000 * 'x' }}",
    "list times number": "{{ (range(100000)|list * 100000)|length }}",
    "power": "{{ 10 ** 1000000000 }}",
    "center": "{{ 'x'|center(300000000) }}",
    "ljust": "{{ 'x'.ljust(300000000) }}",
    "percent format": "{{ '%300000000d' % 1 }}",
    "format filter": "{{ '%300000000d'|format(1) }}",
    "format method": "{{ '{:>300000000}'.format(1) }}",
    "join with a long separator": "{{ range(100000)|map('string')|join('x' * 10000) }}",
    "join method over a generator": "{{ ''.join(range(100000)|map('replace', '0', 'x' * 10000)) }}",
    "join of an attribute": "{% set s = 'x' * 9000000 %}{{ ([{'a': s}] * 9000)|join(attribute='a') }}",
    "a list printed": "{% set s = 'x' * 9000000 %}{{ [s] * 9000 }}",
    "a list with ~": "{% set s = 'x' * 9000000 %}{% set t = [s] * 9000 ~ '' %}",
    "a list as JSON": "{% set s = 'x' * 9000000 %}{{ ([{'a': s}] * 9000)|tojson }}",
    "JSON indented": "{{ [1, 2, 3]|tojson(indent=300000000) }}",
    "JSON with long separators": "{{ range(9000)|list|tojson(separators=('x' * 9000000, ':')) }}",
    "a value formatted many times": "{% set s = 'x' * 9000000 %}{{ ('{0}' * 9000).format(s) }}",
    "a value percent-formatted many times": "{% set s = 'x' * 9000000 %}{{ ('%(a)s' * 9000) % {'a': s} }}",
    "translate": "{{ ('x' * 90000).translate({120: 'y' * 900000}) }}",
    "indent with a string": "{{ ('x\n' * 100000)|indent('y' * 100000) }}",
    "wordwrap with a string": "{{ ('x ' * 100000)|wordwrap(1, wrapstring='y' * 100000) }}",
    "lists in lists": GROW % "{% set ns.l = [ns.l] * 1000 %}" + "{{ ns.l }}",
    "indent": "{{ ('x\n' * 1000000)|indent(100000) }}",
    "sum of lists": "{{ [[1], [2]]|sum(start=[]) }}",
    "doubling with ~": GROW % "{% set ns.s = ns.s ~ ns.s %}",
    "doubling with +": GROW % "{% set ns.s = ns.s + ns.s %}",
    "doubling a list": GROW % "{% set ns.l = ns.l + ns.l %}",
    "doubling with a block": GROW % "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}",
    "doubling with replace": GROW % "{% set ns.s = ns.s.replace('x', ns.s) %}",
    "doubling with the replace filter": GROW % "{% set ns.s = ns.s|replace('x', ns.s) %}",
    "endless output": "{% for i in range(100000) %}{{ 'x' * 10000 }}{% endfor %}",
    "format method with a width that is a value": "{{ '{:>{w}}'.format(1, w=300000000) }}",
    "format method with many widths": "{{ ('{:99999}' * 90000).format(*[1] * 90000) }}",
    "bytes that are formatted": "{{ 'a%300000000d'.encode() % 1 }}",
    "bytes with a width": "{{ 'a'.encode().ljust(300000000) }}",
    "bytes of a number": "{{ (1).to_bytes(300000000, 'big') }}",
    "encoding that takes the square": "{{ ('é' * 3000000).encode('punycode') }}",
    "round far behind the point": "{{ 1|round(31000000, 'ceil') }}",
    "number divided": "{{ ((3 ** 12000000) // (3 ** 6000000)) > 1 }}",
    "number divided with a rest": "{% set x = 3 ** 12000000 %}{{ (x % (3 ** 6000000)) > 1 }}",
    "number from hexadecimal": "{% set x = ('f' * 30000000)|int(base=16) %}{{ (x // 7) > 1 }}",
    "long numbers printed": "{{ [10 ** 4000] * 1000000 }}",
    "a dict's values printed": "{% set s = 'x' * 9000000 %}{{ {'a': [s] * 9000}.values() }}",
    "a namespace printed": "{% set s = 'x' * 9000000 %}{% set n = namespace(a=[s] * 9000) %}{{ n }}",
    "wordwrap over one long word": "{{ ('x' * 8000000)|wordwrap(79) }}",
    "wordwrap in narrow lines": "{{ ('x' * 500000)|wordwrap(1) }}",
    "equality of lists that share": LISTS + "{{ n.a == n.b }}",
    "equality in a chain": LISTS + "{{ 1 < 2 != n.a == n.b }}",
    "equality by a test": LISTS + "{{ n.a is eq n.b }}",
    "equality by a selection": LISTS + "{{ [n.a]|select('eq', n.b)|list }}",
    "equality of a dict's items": LISTS + "{{ {1: n.a}.items() == {1: n.b}.items() }}",
    "a list of lists that share": LISTS + "{{ n.a in [n.b] }}",
    "sharing without brackets": SHARED % ("(n.a|batch(2)|list) * 2", "(n.b|batch(2)|list) * 2") + "{{ n.a == n.b }}",
    "counting in lists that share": LISTS + "{{ n.a.count(n.b) }}",
    "sorting lists that share": LISTS + "{{ [n.a, n.b]|sort }}",
    "a key that shares": TUPLES + "{{ {n.a: 1} }}",
    "a key that is looked up": TUPLES + "{{ {}[n.a] }}",
    "a key that is looked up by a method": TUPLES + "{{ {}.get(n.a) }}",
    "a key that is looked for": TUPLES + "{{ n.a in {1: 2} }}",
    "a unique one of those that share": TUPLES + "{{ [[n.a]]|map('first')|unique|list }}",
    "python internals": "{{ ().__class__.__bases__[0].__subclasses__() }}",
    "changing the row": "{{ items.append(1) }}",
}


def render(source: str, **values: Any) -> str:
    sandbox = Sandbox(strict=True)
    return sandbox.render_capped(sandbox.compile_template(source), values)


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_within_seconds_of_work_and_a_bounded_amount_of_memory(name: str) -> None:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.thread_time()
    with pytest.raises(TemplateFailed):
        render(BOMBS[name], items=[])
    assert time.thread_time() - started < 3
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600 * 1024


def test_a_bomb_ends_in_a_thread_that_is_not_the_main_one() -> None:
    messages: list[str] = []

    def run() -> None:
        try:
            render(BOMBS["nested loops that put nothing out"])
        except TemplateFailed as problem:
            messages.append(str(problem))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(messages) == 1 and "1 s" in messages[0]


def test_the_environment_is_as_good_as_new_after_a_bomb() -> None:
    sandbox = Sandbox(strict=True)
    bomb, fine = (sandbox.compile_template(source) for source in (BOMBS["endless output"], "{{ a }}!"))
    for _ in range(2):
        with pytest.raises(TemplateFailed):
            sandbox.render_capped(bomb, {})
        assert sandbox.render_capped(fine, {"a": 1}) == "1!"


@pytest.mark.parametrize(
    "source",
    [
        "{{ a ~ '!' ~ 3 }} {{ 3 * 'ab' }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ '%05d' % 3 }} {{ '{:>5}'.format(a) }}",
        "{% for m in items %}{{ loop.index }}{{ m|upper }}{% if m == 'b' %}{% break %}{% endif %}{% endfor %}",
        "{{ items|join(', ') }} {{ ', '.join(items) }} {{ items|map('upper')|join }} {{ [1, 2]|sum }}",
        "{{ a|replace('b', 'x') }} {{ a.replace('a', '') }} {{ a|center(9) }} {{ a|indent(2) }} {{ a|wordwrap(3) }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(a) }}{% set b %}{{ a }}{{ a }}{% endset %}{{ b }}",
        "{% for x in items recursive %}{{ x }}{% endfor %}{{ items|batch(2)|list }} {{ items|tojson }}",
        "{% call(u) g() %}{{ u }}{% endcall %}",
        "{{ [{'n': 1}, {'n': 2}]|join('-', attribute='n') }} {{ [1, 2] ~ none }} {{ '%s %s' % (a, items) }}",
        "{{ '**{}** 12345678 {{'.format(a) }} {{ '{:<7}|{!r}'.format(a, a) }}",
        "{{ (-1) ** 99999 }} {{ a.encode()|length }}",
        "{{ items == ['a', 'b', 'c'] }} {{ items in [items] }} {{ ('a', 1) in {('a', 1): 2} }} {{ 1 < 2 <= 2 != 3 }}",
        "{{ items|sort|join }} {{ items|map('upper')|unique|list }}",
        "{{ items.index('b') }} {{ {a: 1}[a] }} {{ 2.5|round(1) }} {{ {'a': items}.items() == {}.items() }}",
        "{% for k, of_k in items|groupby(0) %}{{ k }}{{ of_k|min }}{% endfor %}",
        "{{ items|string }} {{ items|pprint }} {{ 7.5|round }} {{ items|batch(2, 'z')|list }} {{ {'a': items} }}",
    ],
)
def test_ordinary_templates_render_as_in_plain_jinja(source: str) -> None:
    values: dict[str, Any] = {"a": "a\nb", "items": ["a", "b", "c"], "g": lambda caller: caller("u")}
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(source).render(values)
    assert render(source, **values) == plain


@pytest.mark.parametrize(
    "source",
    [
        "".join(f"{{% for a{i} in items %}}" for i in range(25)) + "y" + "{% endfor %}" * 25,
        "{% if a %}" * 110 + "y" + "{% endif %}" * 110,
        "{{ " + " + ".join(["a"] * 250) + " }}",
        "{{ a" + "|trim" * 400 + " }}",
        "{{ " + "(" * 3000 + "a" + ")" * 3000 + " }}",
        "{% break %}",
    ],
    ids=["loops", "conditions", "sums", "filters", "brackets", "break"],
)
def test_a_template_that_python_cannot_compile_is_refused(source: str) -> None:
    with pytest.raises(TemplateFailed, match=r"the template (is nested too deeply|cannot be compiled)"):
        Sandbox(strict=True).compile_template(source)


def test_strict_refuses_unknown_names_and_lenient_prints_nothing() -> None:
    with pytest.raises(TemplateFailed, match="'nothing' is undefined"):
        render("{{ nothing }}")
    lenient = Sandbox(strict=False)
    assert lenient.render_capped(lenient.compile_template("<{{ nothing }}>"), {}) == "<>"
