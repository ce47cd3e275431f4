from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.prompts.templates import RowTemplate
from bulkrun.request import RowError

COLUMNS = ["text", "title", "my column"]


def render(source: str, **row: object) -> str | RowError:
    return RowTemplate("prompt.template", source, COLUMNS).render(row)


def test_values_that_look_like_templates_are_text() -> None:
    assert render("<{{ text }}>", text="{{ 7 * 7 }}{% raw %}") == "<{{ 7 * 7 }}{% raw %}>"


def test_one_line_break_at_the_end_is_yamls_and_no_part_of_the_prompt() -> None:
    assert [render(f"{{{{ text }}}}:{end}", text="a\n") for end in ("", "\n", "\n\n")] == ["a\n:", "a\n:", "a\n:\n"]


def test_only_the_columns_that_are_named_are_read() -> None:
    assert RowTemplate("k", "{{ text }}{% set title = 1 %}{{ title }}", COLUMNS).reads == ["text"]
    assert RowTemplate("k", "{{ row['my column'] }}", COLUMNS).reads == ["my column"]
    assert RowTemplate("k", "{{ row.text }}{{ row['my column'] }}{{ title }}", COLUMNS).reads == COLUMNS


@pytest.mark.parametrize(
    "source",
    [
        "{{ row }}",
        "{{ row | tojson }}",
        "{{ row['text'] }}{% for k, v in row.items() %}{{ v }}{% endfor %}",
        "{% set r = row %}{{ r['title'] }}",
        "{{ row['te' ~ 'xt'] }}",
        "{{ row.get('text') }}",
        "{{ row['none such'] | default('') }}",
    ],
)
def test_a_template_that_does_anything_else_with_the_row_reads_all_of_it(source: str) -> None:
    template = RowTemplate("k", source, COLUMNS)
    assert template.reads == COLUMNS
    assert isinstance(template.render({"text": "a", "title": "b", "my column": "c"}), str)


def test_the_whole_row_reaches_columns_that_are_no_identifiers() -> None:
    assert render("{{ row['my column'] }} {{ title }}", text="", title="t", **{"my column": 5}) == "5 t"


@pytest.mark.parametrize("name", ["namespace", "range", "dict", "cycler", "joiner", "loop", "caller", "row", "class"])
def test_a_column_is_read_whatever_jinja_itself_has_under_its_name(name: str) -> None:
    template = RowTemplate("k", f"{{{{ {name} }}}}", ["text", name])
    assert template.reads == [name] and template.render({"text": "t", name: "mine"}) == "mine"


def test_a_name_that_is_called_is_jinjas_function_beside_a_column_of_that_name() -> None:
    template = RowTemplate("k", "{% for i in range(2) %}{{ text }}{{ i }}{% endfor %}", ["text", "range"])
    assert template.reads == ["text"] and template.render({"text": "t", "range": 5}) == "t0t1"


def test_a_function_of_jinja_that_is_not_called_is_no_column_either() -> None:
    with pytest.raises(JobFileError, match="no column 'namespace'; the input has: text"):
        RowTemplate("k", "{{ text }} {{ namespace }}", ["text"])


def test_the_one_name_that_jinja_keeps_is_told_how_to_be_written() -> None:
    with pytest.raises(JobFileError, match=r"the column 'self' is written \{\{ row\[\"self\"\] \}\}"):
        RowTemplate("k", "{{ self }}", ["self"])
    assert RowTemplate("k", '{{ row["self"] }}', ["self"]).render({"self": "mine"}) == "mine"


def test_a_syntax_error_is_found_before_the_run_with_its_key_and_line() -> None:
    with pytest.raises(JobFileError, match=r"prompt\.template: template line 2: "):
        RowTemplate("prompt.template", "a\n{{ text ", COLUMNS)


@pytest.mark.parametrize("source", ["{{ my column }}", "a {% if my column %}b{% endif %}", "{{ first-name | upper }}"])
def test_a_column_that_is_no_identifier_is_told_how_to_be_written(source: str) -> None:
    with pytest.raises(JobFileError) as problem:
        RowTemplate("prompt.template", source, ["text", "my column", "first-name"])
    name = "first-name" if "first" in source else "my column"
    assert all(f"the column '{name}' is written {{{{ row[\"{name}\"] }}}}" in one for one in problem.value.problems)


@pytest.mark.parametrize(
    "source", ["my column {{ txet }}", "{{ row['my column'] }} {{ txet }}", '{{ row["my column"] }']
)
def test_nobody_is_told_so_who_writes_it_so_already(source: str) -> None:
    with pytest.raises(JobFileError) as problem:
        RowTemplate("prompt.template", source, COLUMNS)
    assert "is written" not in str(problem.value)


def test_unknown_columns_are_all_found_before_the_run_with_the_nearest_name() -> None:
    with pytest.raises(JobFileError) as problem:
        RowTemplate("prompt.template", "{{ txet }} {{ titel }} {{ zzzzzz }}", COLUMNS)
    near, far = problem.value.problems[0], problem.value.problems[2]
    assert len(problem.value.problems) == 3
    assert near == "prompt.template: the input has no column 'titel'; did you mean 'title'?"
    assert far == "prompt.template: no column 'zzzzzz'; the input has: text, title, my column"


def test_a_bomb_in_a_constant_is_found_before_the_run_or_at_the_row() -> None:
    error = render("{{ 'x' * 300000000 }}")
    assert isinstance(error, RowError) and error.code == "bad_template"


@pytest.mark.parametrize(
    "source", ["{{ text.missing }}", "{{ text + 1 }}", "{{ 1 / 0 }}", "{{ text() }}", "{{ text[9].x }}"]
)
def test_what_goes_wrong_for_a_rows_values_is_that_rows_error(source: str) -> None:
    error = render(source, text="abc")
    assert (
        isinstance(error, RowError) and error.code == "bad_template" and error.message.startswith("prompt.template: ")
    )


def test_a_printed_null_is_an_error_that_names_the_column_instead_of_the_word_none() -> None:
    error = render("{{ title }}: {{ text }}", text=None, title="t")
    assert isinstance(error, RowError) and error.code == "bad_input" and "prints 'text'" in error.message
    assert "write {{ text or '' }} where" in error.message
    odd = render("{{ row['my column'] }}", text="a", title="t", **{"my column": None})
    assert isinstance(odd, RowError) and "write {{ row['my column'] or '' }} where" in odd.message
    assert render("{{ text or 'no text' }}{% if text %}x{% endif %}", text=None) == "no text"


@pytest.mark.parametrize(
    ("source", "blamed"),
    [
        ("{{ text }} {{ row['my column'] }}", "'text', 'my column', which"),
        ("{{ text or '' }} {{ row.title }}", "'text', 'title', which"),
        ("{{ row.title }} {{ row['my column'] }}", "'my column', 'title', which"),
        ("{{ text }} {{ '%(title)s' % row }}", "'text' or a column taken from row, which"),
        ("{{ '%(title)s' % row }}", "'text', 'my column', 'title', 'unused', which"),
    ],
)
def test_a_printed_null_blames_no_column_that_the_template_does_not_take(source: str, blamed: str) -> None:
    columns = ["text", "my column", "title", "unused"]
    error = RowTemplate("prompt.template", source, columns).render(dict.fromkeys(columns))
    assert isinstance(error, RowError) and f"prints {blamed} is null in this row" in error.message


@pytest.mark.parametrize(
    "source",
    [
        *(
            f"{{{{ text | {name} }}}}"
            for name in ("trim", "upper", "string", "title", "e", "urlencode", "replace('a', 'b')")
        ),
        "{{ text ~ title }}",
        "{{ [text, title] | join(' ') }}",
        "{{ ', '.join([title, text]) }}",
        "{{ [{'a': text}] | join(attribute='a') }}",
        "{{ '%s' % text }}",
        "{{ '%s %s' % (title, text) }}",
        "{{ '%(text)s' % row }}",
        "{{ '{} {}'.format(title, text) }}",
        "{{ '{text}'.format(text=text) }}",
        "{{ '{text!r:>9}'.format_map(row) }}",
        "{{ '%s %s' | format(title, text) }}",
        "{{ title | replace('t', text) }}",
        "{{ [text] | map('upper') | first }}",
        "{{ {'text': text}.get('text') | trim }}",
        "{% set copy %}{{ text | trim }}{% endset %}{{ title }}",
    ],
)
def test_a_null_is_no_word_in_filters_and_formats_either(source: str) -> None:
    error = render(source, text=None, title="t", **{"my column": 1})
    assert isinstance(error, RowError) and error.code == "bad_input", error
    assert "'text'" in error.message and "null in this row" in error.message


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ text or '-' }}{{ (text or '') | trim }}{{ text | default('-', true) }}{{ text | d('+', true) | trim }}",
            "--+",
        ),
        ("{{ text is none }} {{ 'x' if text else 'y' }} {{ text == none }}", "True y True"),
        ("{{ text | tojson }} {{ {'a': text} | tojson }}", 'null {"a": null}'),
        ("{{ '%(title)s' % row }} {{ '{title}'.format(text=text, **{'title': title}) }}", "t t"),
        ("{{ [text, title] | select | join(' ') }} {{ [text, title] | reject('none') | join(' ') }}", "t t"),
        ("{{ title | truncate(9, true, '', none) }} {{ title | replace('t', 'u') }}", "t u"),
        ("{{ [title] }} {{ [title, title] | join('-') }} {{ '%d%%' % 5 }}", "['t'] t-t 5%"),
    ],
)
def test_a_template_may_look_at_a_null_and_leave_it_out(source: str, expected: str) -> None:
    assert render(source, text=None, title="t", **{"my column": 1}) == expected


def test_tojson_writes_text_as_it_is_and_keys_in_their_order() -> None:
    value = {"tags": ["a<b", "it's", "Zürich"], "a": None, "n": 1.5}
    assert render("{{ text | tojson }}", text=value) == '{"tags": ["a<b", "it\'s", "Zürich"], "a": null, "n": 1.5}'
    assert render("{{ text | tojson + '<' }}", text=["&"]) == '["&"]<'


def test_tojson_writes_times_and_decimals_as_they_print() -> None:
    value = [datetime(2026, 1, 2, 3, 4), date(2026, 1, 2), Decimal("1.50")]
    assert render("{{ text | tojson }}", text=value) == '["2026-01-02 03:04:00", "2026-01-02", "1.50"]'
    error = render("{{ text | tojson }}", text=b"\x00")
    assert isinstance(error, RowError) and "bytes is not JSON serializable" in error.message


def test_numbers_and_lists_print_as_python_does() -> None:
    assert render("{{ text }} {{ title[0] }}", text=1.5, title=["a", "b"]) == "1.5 a"


def test_a_structs_field_comes_before_the_method_of_its_name() -> None:
    struct = {"items": 3, "keys": ["k"], "title": "T"}
    source = "{{ text.items }} {{ text.keys[0] }} {{ text.title }} {{ [text] | map(attribute='items') | first }}"
    assert render(source, text=struct) == "3 k T 3"


@pytest.mark.parametrize(
    ("source", "value"),
    [
        ("{{ text.title }}", '{"title": 1}'),
        ("{{ text['title'] }}", '{"title": 1}'),
        ("{{ text.title | upper }}", "js"),
        ("{{ text.title ~ '!' }}", "js"),
        ("{% if text.title %}x{% endif %}", "js"),
        ("{{ [text] | map(attribute='title') | join }}", "js"),
        ("{{ text.format }}", "js"),
        ("{{ text.items }}", {"a": 1}),
        ("{{ text.count }}", [1]),
        ("{{ text.isoformat }}", date(2026, 1, 2)),
    ],
)
def test_a_method_that_is_not_called_is_no_value(source: str, value: object) -> None:
    error = render(source, text=value)
    assert isinstance(error, RowError) and error.code == "bad_template" and "has no attribute" in error.message


@pytest.mark.parametrize(
    ("source", "value", "expected"),
    [
        ("{{ text.strip().upper() }} {{ text.split(',')[1] }} {{ '{}!'.format(text) }}", " a,b ", "A,B b   a,b !"),
        ("{% for k, v in text.items() %}{{ k }}={{ v }} {% endfor %}{{ text.get('b', 2) }}", {"a": 1}, "a=1 2"),
        ("{{ text.count(1) }} {{ text.index(2) }} {{ text.title | default('none') }}", [1, 2], "1 1 none"),
        ("{{ text.year }} {{ text.strftime('%d') }}", date(2026, 1, 2), "2026 02"),
        ("{% set n = namespace(c=0) %}{% for x in text %}{% set n.c = n.c + 1 %}{% endfor %}{{ n.c }}", [1, 2], "2"),
        ("{% for x in text %}{{ loop.cycle('a', 'b') }}{{ loop.last }} {% endfor %}", [1, 2], "aFalse bTrue "),
        ("{% set j = joiner('-') %}{% for x in text %}{{ j() }}{{ x }}{% endfor %}", [1, 2], "1-2"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(text) }}", 1, "<1>"),
    ],
)
def test_methods_are_called_where_no_field_has_their_name(source: str, value: object, expected: str) -> None:
    assert render(source, text=value) == expected


def test_a_function_is_nothing_to_print() -> None:
    for source in ("{{ range }}{{ range(2) }}", "{% macro f() %}{% endmacro %}{{ f }}"):
        error = render("{{ text }}" + source, text="t")
        assert isinstance(error, RowError) and error.code == "bad_template" and "prints a function" in error.message


def test_what_a_filter_has_not_made_yet_is_nothing_to_print() -> None:
    error = render("{{ text | map('upper') }}", text=["a"])
    assert isinstance(error, RowError) and "write | list or | join behind it" in error.message
