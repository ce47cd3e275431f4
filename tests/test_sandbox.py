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
        "{{ items|string }} {{ items|pprint }} {{ 7.5|round }} {{ items|batch(2, 'z')|list }} {{ {'a': items} }}",
    ],
)
def test_ordinary_templates_render_as_in_plain_jinja(source: str) -> None:
    values: dict[str, Any] = {"a": "a\nb", "items": ["a", "b", "c"], "g": lambda caller: caller("u")}
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(source).render(values)
    assert render(source, **values) == plain


def test_strict_refuses_unknown_names_and_lenient_prints_nothing() -> None:
    with pytest.raises(TemplateFailed, match="'nothing' is undefined"):
        render("{{ nothing }}")
    lenient = Sandbox(strict=False)
    assert lenient.render_capped(lenient.compile_template("<{{ nothing }}>"), {}) == "<>"
