from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of, job_schema, load_job, override_job
from bulkrun.job.jobfile.spec import JobSpec

GOOD = """\
name: summarize
model: bundled:tiny
input:
  path: [data/a.parquet, data/*.parquet]
  columns: [title]
prompt:
  messages:
    - {role: system, content: "Be short."}
    - {role: user, content: "{{ text }}"}
sampling: {max_tokens: 64, temperature: 0, stop: ["\\n"]}
output: {path: out/summaries}
run:
  limit: null
  checkpoint_every: 5
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(text: str | bytes, *overrides: str) -> JobSpec:
    Path("x.yaml").write_bytes(text.encode() if isinstance(text, str) else text)
    return load_job(Path("x.yaml"), overrides)


def problems(text: str | bytes, *overrides: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        load(text, *overrides)
    assert caught.value.exit_code == 2
    return caught.value.problems


@pytest.mark.parametrize("unclosed", ['"{{ text }}', "[a, b", "{a: b"])
def test_what_is_never_closed_is_told_by_where_it_begins(tmp_path: Path, unclosed: str) -> None:
    (tmp_path / "job.yaml").write_text(f"name: a\nprompt:\n  template: {unclosed}\noutput: {{path: o}}\n")
    with pytest.raises(JobFileError, match=r"not valid YAML: .* that begins at 3:13\)"):
        load_job(tmp_path / "job.yaml")


def test_a_directory_in_the_place_of_a_job_file_may_be_a_run(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match=f"is a directory, not a job file; .* `bulkrun status {tmp_path}` tells"):
        load_job(tmp_path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.parquet", "rows.jsonl.gz"])
def test_data_in_the_place_of_a_job_file_is_told_how_to_get_one(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"id": 1, "text": "a"}\n')
    with pytest.raises(JobFileError, match=f"is data, not a job file; `bulkrun init .*{name}` writes"):
        load_job(tmp_path / name)


def test_a_good_job_becomes_a_spec(folder: Path) -> None:
    spec = load(GOOD)
    assert spec.input.path == ["data/a.parquet", "data/*.parquet"]
    assert isinstance(spec.prompt.messages, list) and spec.prompt.messages[1].content == "{{ text }}"
    assert spec.sampling.temperature == 0 and spec.sampling.stop == ["\n"]
    assert spec.run.limit is None and spec.run.checkpoint_every == 5


def test_every_problem_is_reported_at_once_in_the_order_of_the_file(folder: Path) -> None:
    text = """\
nam: x
model: 5
input:
  path: 7
  colums: [a]
  sql: NO
prompt:
  template: "{{ x }}"
  column: y
sampling:
  temperature: "0.7"
  max_tokens: 1.5
  max_tokens: 2
  top_p: 3
  n: 010
  stop: [1]
run:
  limit: 12:30
  on_too_long: eror
  gpus: 4
  temperature: 1
"""
    assert problems(text) == [
        "x.yaml:1:1: nam: unknown key, did you mean name?",
        "x.yaml:1:1: name: is missing. A short name: letters, digits, dot, dash, underscore.",
        "x.yaml:1:1: output: is missing. Where the results go.",
        'x.yaml:2:1: model: 5 is not text; quote it: "5"',
        'x.yaml:4:3: input.path: 7 is not text or a list; quote it: "7"',
        "x.yaml:5:3: input.colums: unknown key, did you mean columns?",
        'x.yaml:6:8: input.sql: YAML reads NO as true or false; write true or false, or quote it ("NO") if it is text',
        "x.yaml:7:1: prompt: needs one of template, messages, column, token_ids; has template and column",
        'x.yaml:11:3: sampling.temperature: "0.7" is not a number; remove the quotes: 0.7',
        "x.yaml:12:3: sampling.max_tokens: 1.5 is not a whole number",
        "x.yaml:13:3: sampling.max_tokens: the key appears twice (first on line 12); keep one",
        "x.yaml:14:3: sampling.top_p: 3 is out of range: at most 1 is wanted",
        "x.yaml:15:6: sampling.n: YAML does not read 010 as the number it looks like; write plain digits, "
        'or quote it ("010") if it is text',
        'x.yaml:16:10: sampling.stop[0]: 1 is not text; quote it: "1"',
        "x.yaml:18:10: run.limit: YAML does not read 12:30 as the number it looks like; write plain digits, "
        'or quote it ("12:30") if it is text',
        'x.yaml:19:3: run.on_too_long: "eror" is not one of error, truncate_left, truncate_right; did you mean error?',
        "x.yaml:20:3: run.gpus: unknown key here; gpus belongs to slurm: or ray:",
        "x.yaml:21:3: run.temperature: unknown key here; temperature belongs to sampling:",
    ]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("{role: user,", "{role: usr,", '9:8: prompt.messages[1].role: "usr" is not one of system'),
        ('role: user, content: "{{ text }}"', "role: user", "9:7: prompt.messages[1].content: is missing. "),
        ("columns: [title]", "columns: title", '5:3: input.columns: "title" is not a list'),
        ("columns: [title]", "columns: {a: 1}", "5:3: input.columns: a section is not a list"),
        ("name: summarize", "name: a b", '1:1: name: "a b" cannot be used here. A short name'),
        ("max_tokens: 64", "structured_outputs: {choice: []}", "10:33: sampling.structured_outputs.choice: is an em"),
        ("max_tokens: 64", "max_tokens: 0", "10:12: sampling.max_tokens: 0 is out of range: at least 1 is wanted"),
        ("max_tokens: 64", "max_tokens: 3, min_tokens: 9", "10:27: sampling.min_tokens: 9 is not between 0"),
        (
            "max_tokens: 64",
            "logprobs_over: allowed",
            "10:12: sampling.logprobs_over: allowed says nothing without sampling.logprobs",
        ),
        (
            "max_tokens: 64",
            "logprobs: 2, logprobs_over: allowed",
            "10:25: sampling.logprobs_over: allowed says nothing without sampling.structured_outputs or allowed",
        ),
        ("max_tokens: 64", "logit_bias: {'5': -101}", "10:12: sampling.logit_bias: -101.0 for token 5 is not between"),
        ("max_tokens: 64", "logit_bias: {yes_: 1}", '10:25: sampling.logit_bias.yes_: "yes_" is not a whole number'),
        ("max_tokens: 64", "bad_words: no_", '10:12: sampling.bad_words: "no_" is not a list; write ["no_"]'),
        ("max_tokens: 64", "stop_token_ids: '5'", '10:12: sampling.stop_token_ids: "5" is not a list; write ["5"]'),
        ("max_tokens: 64", "bad_words: [a, '']", "10:12: sampling.bad_words: ('a', '') is not free of empty strings"),
        ("max_tokens: 64", "bad_words: [5]", '10:24: sampling.bad_words[0]: 5 is not text; quote it: "5"'),
        ("max_tokens: 64", "allowed_token_ids: []", "10:12: sampling.allowed_token_ids: an empty list allows no"),
        ("max_tokens: 64", "allowed_token_ids: [a]", '10:32: sampling.allowed_token_ids[0]: "a" is not a whole number'),
        (
            "max_tokens: 64",
            "allowed_token_ids: [5], logit_bias: {'6': 1}",
            "10:36: sampling.logit_bias: token 6 is made likelier and is not among allowed_token_ids; add it there",
        ),
        ("max_tokens: 64", "best_of: 2, n: 3", "10:12: sampling.best_of: 2 is less than n (3)"),
        ("max_tokens: 64", "per_row: {tempratur: x}", '10:22: sampling.per_row.tempratur: "tempratur" is not one of'),
        ("max_tokens: 64", "per_row: {tempratur: x}, n: 0", "10:37: sampling.n: 0 is out of range: at least 1"),
        ("limit: null", "incremental: true", "13:3: run.incremental: needs input.id, the column that identifies"),
        ("limit: null", "on_vanished: drop", "13:3: run.on_vanished: drop needs run.incremental; without it"),
        ("out/summaries", '""', '11:10: output.path: "" cannot be used here. The result directory'),
        ("run:", 'engine: {adapter: ""}\nrun:', '12:10: engine.adapter: "" cannot be used here. A LoRA adapter'),
        ("out/summaries", "s3://", "11:10: output.path: a directory or s3://BUCKET/PREFIX"),
        ("path: out/summaries", "path: out, state: x", "11:21: output.state: only with path: s3://"),
        ('stop: ["\\n"]', "stop: ''", "10:44: sampling.stop: ('',) is not free of empty strings"),
        (
            "checkpoint_every: 5",
            "checkpoint_every: 5\nengine: {deterministic: true, quantization: fp8}",
            "15:10: engine.deterministic: does not go with quantization: fp8",
        ),
        (
            "run:",
            "engine: {max_num_seqs: 9, max_num_batched_tokens: 8}\nrun:",
            "12:27: engine.max_num_batched_tokens: 8 is below max_num_seqs, 9",
        ),
        ("run:", 'slurm: {extra: [a, ""]}\nrun:', '12:20: slurm.extra[1]: "" cannot be used here. More sbatch'),
        ("checkpoint_every: 5", 'checkpoint_every: "5"', '14:3: run.checkpoint_every: "5" is not a number; remove'),
        ("checkpoint_every: 5", "checkpoint_every: .inf", "14:21: run.checkpoint_every: YAML does not read .inf"),
        ("checkpoint_every: 5", "checkpoint_every: 1e999", "14:21: run.checkpoint_every: 1e999 is too large a number"),
        ("checkpoint_every: 5", "walltime: -1.5e400", "14:13: run.walltime: -1.5e400 is too large a number"),
        ("name: summarize", 'name: "a\\0"', "1:7: name: holds a NUL"),
        ("bundled:tiny", '"\\ud800"', "2:8: model: holds a NUL (\\0) or half a surrogate pair"),
        ("model: bundled:tiny", '"\\udfff": x\nmodel: m', "2:1: a key holds a NUL (\\0) or half a surrogate pair"),
        (
            "output: {path: out/summaries}",
            "output: out",
            '11:1: output: "out" is not a section of keys and values; write output: {path: "out"}',
        ),
        (
            "  path: [data/a.parquet, data/*.parquet]\n  columns: [title]",
            "  - data/a.parquet",
            "3:1: input: a list is not a section of keys and values; write input: {path: [...]}",
        ),
        ("bundled:tiny", "[a]", "2:1: model: a list is not text"),
        ("model: bundled:tiny", "1: x\nmodel: m", "2:1: the key 1 is not text; quote it"),
        ("model: bundled:tiny", "model: !!python/name:os.system x", "2:8: model: the tag !!python/name:os.system"),
        ("model: bundled:tiny", "model: 0x1F", "2:8: model: YAML does not read 0x1F as the number"),
        ("output: {path", "<<: {a: 1}\noutput: {path", "11:1: merge keys (<<) are not allowed"),
        ("checkpoint_every: 5", "checkpoint_every: [", "15:1: not valid YAML: "),
        ("name: summarize", "name: a\x07b", "1:1: not valid YAML: the character '\\x07' is not allowed"),
        ("name: summarize", "a: &a [*a]\nname: x", "1:1: nested too deeply"),
    ],
)  # fmt: skip
def test_a_problem_names_its_place_value_and_fix(folder: Path, old: str, new: str, problem: str) -> None:
    assert old in GOOD
    found = problems(GOOD.replace(old, new))
    assert len([line for line in found if line.startswith(f"x.yaml:{problem}")]) == 1, found


@pytest.mark.parametrize(
    ("old", "new", "problem", "is_optional"),
    [
        ("name: summarize", "name:", "1:1: name: has no value; text is wanted", False),
        ("path: out/summaries", "path: ", "11:10: output.path: has no value; text is wanted", False),
        ("output: {path: out/summaries}", "output:", "11:1: output: has no value; a section of keys and", False),
        ('content: "{{ text }}"', "content:", "9:20: prompt.messages[1].content: has no value; text", False),
        ("columns: [title]", "columns: [~]", "5:13: input.columns[0]: has no value; text is wanted", False),
        ("max_tokens: 64", "n:", "10:12: sampling.n: has no value; a whole number is wanted", True),
        ("sampling: {", "engine:\nsampling: {", "10:1: engine: has no value; a section of keys and values", True),
        ("max_tokens: 64", "per_row: {seed: }", "10:22: sampling.per_row.seed: has no value; text is", True),
    ],
)
def test_a_key_without_a_value_may_be_left_out_where_it_is_not_required(
    folder: Path, old: str, new: str, problem: str, is_optional: bool
) -> None:
    [said] = problems(GOOD.replace(old, new))
    assert said.startswith(f"x.yaml:{problem}") and said.endswith("(or leave the key out)") == is_optional


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("0.5", 0.5), ("1", 1), (".5", 0.5), ("2.5e+1", 25.0), ("null", None), ("~", None)],
)
def test_numbers_are_read_as_everyone_reads_them(folder: Path, text: str, value: float | None) -> None:
    assert load(GOOD.replace("temperature: 0", f"temperature: {text}")).sampling.temperature == value


def test_a_date_is_text(folder: Path) -> None:
    assert load(GOOD.replace("out/summaries", "2026-01-31")).output.path == "2026-01-31"


def test_an_anchor_can_be_used_twice_and_an_override_changes_one_place_only(folder: Path) -> None:
    text = GOOD + "engine: {max_num_seqs: &n 3, block_size: *n}\n"
    spec = load(text, "engine.block_size=8")
    assert (spec.engine.max_num_seqs, spec.engine.block_size) == (3, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "x.yaml:1:1: the job file is empty; `bulkrun init INPUT --out FILE` writes one to start from"),
        ("# nothing\n", "x.yaml:1:1: the job file is empty"),
        ("- a\n", "x.yaml:1:1: the job file is a list, not keys and values"),
        ("just words", 'x.yaml:1:1: the job file is "just words", not keys and values'),
        ("a: 1\n---\nb: 2\n", "x.yaml:2:1: not valid YAML: but found another document"),
        (b"name: ok\nmodel: \xff\n", "x.yaml:2:1: not UTF-8 text"),
        ("x" * (2**20 + 1), "x.yaml: more than 1048576 bytes"),
        ("[" * 100_000, "x.yaml:1:1: nested too deeply"),
        (b"a: \xf0\x9f\x98\x80: b", "x.yaml:1:5: not valid YAML"),
    ],
)
def test_what_is_no_job_file_at_all_is_one_clear_problem(folder: Path, text: str | bytes, problem: str) -> None:
    [found] = problems(text)
    assert found.startswith(problem)


def test_an_alias_bomb_is_cut_short(folder: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert any("more than 100000 values with the aliases written out" in line for line in problems("\n".join(lines)))


def test_missing_files_and_folders_are_named(folder: Path) -> None:
    for path in ("nothing.yaml", "."):
        with pytest.raises(JobFileError, match=path):
            load_job(Path(path))


def test_a_byte_order_mark_is_fine(folder: Path) -> None:
    assert load(b"\xef\xbb\xbf" + GOOD.encode()).name == "summarize"


@pytest.mark.parametrize(
    ("override", "where", "value"),
    [
        ("sampling.temperature=0.7", ("sampling", "temperature"), 0.7),
        ("run.limit=10", ("run", "limit"), 10),
        ("engine.max_num_seqs=8", ("engine", "max_num_seqs"), 8),
        ("input.path=b=c.jsonl", ("input", "path"), "b=c.jsonl"),
        ("input.path=[a.csv, b.csv]", ("input", "path"), ["a.csv", "b.csv"]),
        ("input.columns=", ("input", "columns"), None),
        ('sampling.stop="\\n\\n"', ("sampling", "stop"), "\n\n"),
        ("sampling.per_row={top_k: k}", ("sampling", "per_row"), {"top_k": "k"}),
        ("name=other", ("name",), "other"),
    ],
)
def test_an_override_wins_over_the_file(folder: Path, override: str, where: tuple[str, ...], value: Any) -> None:
    found: Any = load(GOOD, override)
    for part in where:
        found = getattr(found, part)
    assert found == value


def test_the_last_of_two_overrides_wins_and_a_whole_section_can_be_set(folder: Path) -> None:
    spec = load(GOOD, "sampling={top_k: 5}", "sampling.top_k=6", "sampling.top_k=7")
    assert spec.sampling.top_k == 7 and spec.sampling.max_tokens is None


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("sampling.temprature=3", "--set sampling.temprature: unknown key, did you mean temperature?"),
        ("run.limit=many", '--set run.limit: "many" is not a whole number'),
        ("run.limit=010", "--set run.limit: YAML does not read 010 as the number it looks like"),
        ("input.path.x=3", "--set input.path.x: input.path is a list, not a section of keys; set it whole"),
        ("output={pth: a}", "--set output.pth: unknown key, did you mean path?"),
        ("limit", "--set limit: write it as key=value"),
        ("=3", "--set =3: write it as key=value"),
        ("a..b=3", "--set a..b=3: write it as key=value"),
        ("run.limit=[", "--set run.limit: not valid YAML"),
        ("limit=5", "--set limit: unknown key here; limit belongs to run:"),
        ("smpling.temperature=1", "--set smpling: unknown key, did you mean sampling?"),
        ("sampling.structured_outputs.jsn.type=object", "--set sampling.structured_outputs.jsn: unknown key, did"),
        ("engine.device.name=cpu", "--set engine.device: a section is not one of auto"),
    ],
)
def test_a_wrong_override_says_set_and_the_key(folder: Path, override: str, problem: str) -> None:
    assert any(line.startswith(problem) for line in problems(GOOD, override))


def test_a_key_that_an_override_makes_wrong_is_told_without_a_line_where_there_is_no_file(folder: Path) -> None:
    recorded = load(GOOD, "sampling.min_tokens=5").model_dump(mode="json")
    with pytest.raises(JobFileError) as caught:
        override_job(recorded, ["sampling.max_tokens=4"])
    assert caught.value.problems == ["sampling.min_tokens: 5 is not between 0 and max_tokens"]


def test_text_and_numbers_of_an_override_are_read_as_strictly(folder: Path) -> None:
    assert problems(GOOD, "engine.batching_window_s=1e999") == [
        "--set engine.batching_window_s: 1e999 is too large a number"
    ]
    assert "--set input.sql: holds a NUL" in problems(GOOD, 'input.sql="\\ud800"')[0]


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("key", ["run.checkpoint_every", "run.walltime", "run.row_timeout", "ray.cpus", "ray.gpus"])
def test_a_job_from_python_has_finite_numbers(key: str, value: float) -> None:
    section, name = key.split(".")
    job = {"name": "x", "model": "m", "input": {"path": "a"}, "output": {"path": "o"}, section: {name: value}}
    with pytest.raises(JobFileError, match=rf"^{key}: (Infinity|NaN) is not a finite number"):
        job_of(job)


def test_an_override_mends_a_problem_of_the_file(folder: Path) -> None:
    assert load(GOOD.replace("max_tokens: 64", "max_tokens: lots"), "sampling.max_tokens=9").sampling.max_tokens == 9


YAML_PIECES = [
    *(
        "a: ",
        "- ",
        "[",
        "]",
        "{",
        "}",
        "&x ",
        "*x",
        "<<: ",
        "!!int ",
        "!!set ",
        "? ",
        "|\n ",
        "'",
        '"',
        "\n",
        "  ",
        "\t",
    ),
    *("name", "input:\n", "  path: x\n", "null", "NO", "1.5", "0x1", "2024-01-01", "=", "---\n", "%", "@", "\x85", "é"),
]
yaml_pieces = st.sampled_from(YAML_PIECES)


@given(
    pieces=st.lists(yaml_pieces, max_size=12), at=st.integers(0, len(GOOD)), option=st.lists(yaml_pieces, max_size=4)
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_is_a_spec_or_a_list_of_problems_with_places(
    folder: Path, pieces: list[str], at: int, option: list[str]
) -> None:
    for text in ("".join(pieces), GOOD[:at] + "".join(pieces) + GOOD[at:]):
        try:
            load(text, "run.limit=" + "".join(option), "".join(option))
        except JobFileError as error:
            assert all(problem.startswith(("x.yaml:", "--set ")) for problem in error.problems)


def test_the_schema_describes_every_key(folder: Path) -> None:
    schema = job_schema()
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["title"] == "bulkrun job"
    for section in [schema, *schema["$defs"].values()]:
        for key, described in section["properties"].items():
            assert described.get("description"), key
            assert key in section.get("required", ()) or "default" in described, key
        assert section["additionalProperties"] is False


def test_every_job_that_is_shipped_loads() -> None:
    shipped = sorted((Path(__file__).parents[3] / "jobs").glob("*.yaml"))
    assert [load_job(path).name for path in shipped]


def test_a_tab_is_told_as_one(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("name: x\ninput:\n\tpath: y\n")
    with pytest.raises(JobFileError, match="indent with spaces, not with a tab"):
        load_job(tmp_path / "x.yaml")


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("sampling.guided_json={}", "write sampling.structured_outputs: {json: ...}"),
        ("engine.tensor_parallel_size=2", "run.workers starts several"),
        ("engine.enable_lora=true", "write engine.adapter"),
        ("input=rows.jsonl", 'write input: {path: "rows.jsonl"}'),
        ("prompt='Say: {{ x }}'", 'write prompt: {template: "Say: {{ x }}"}'),
        ("sampling.bad_words_ids=[[5]]", "write sampling.bad_words"),
        ("sampling.length_penalty=1.0", "there is no beam search"),
    ],
)
def test_a_key_of_another_runner_is_told_what_it_is_here(tmp_path: Path, override: str, fix: str) -> None:
    (tmp_path / "x.yaml").write_text("name: x\nmodel: m\ninput: {path: y}\noutput: {path: z}\n")
    with pytest.raises(JobFileError) as caught:
        load_job(tmp_path / "x.yaml", [override])
    assert fix in str(caught.value)


@pytest.mark.parametrize(
    "text", ["{{ body }}", "Rate: {t}", 'Say "hi": {{ x }}', "{{ row['a b'] }}", "Two: lines\n\n{{ x }}"]
)
def test_text_with_braces_in_a_set_option_is_told_how_to_be_quoted(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text("name: x\nmodel: m\ninput: {path: y}\noutput: {path: z}\n")
    with pytest.raises(JobFileError) as caught:
        load_job(tmp_path / "x.yaml", [f"prompt.template={text}"])
    command = str(caught.value)
    fix = shlex.split(command[command.index("--set '") :])  # as a shell takes it
    assert len(fix) == 2 and load_job(tmp_path / "x.yaml", fix[1:]).prompt.template == text


@pytest.mark.parametrize(
    "override",
    [
        "prompt.chat_template_kwargs={messages: 1}",
        'sampling.structured_outputs.choice=[yes, "no"]',
        "sampling.structured_outputs.json={type: object, x: yes}",
        "input.columns={a: 1}",
        "run.limit=[5",
        "run.limt=[5",
    ],
)
def test_a_section_or_list_in_a_set_option_is_not_told_to_be_text(folder: Path, override: str) -> None:
    said = problems(GOOD, override)
    assert said and not any("quote text" in line for line in said)


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"run": {"incremental": True}}, "run.incremental: needs input.id"),
        (
            {
                "input": {"path": "a", "id": "i"},
                "output": {"path": "b", "partition_by": ["c"]},
                "run": {"incremental": True},
            },
            "run.incremental: cannot be combined with output.partition_by",
        ),
        ({"input": {"path": "a", "delimiter": '"'}}, "input.delimiter: must be one character other than a quote"),
        ({"engine": {"adapters": {"a": ""}}}, "engine.adapters: each has a name and a directory"),
        (
            {"sampling": {"ignore_eos": True, "structured_outputs": {"regex": "a"}}},
            "sampling.ignore_eos: a structured out",
        ),
        (
            {"prompt": {"messages": [], "continue_final_message": True}},
            "prompt.continue_final_message: the last of prompt.messages is not the assistant's",
        ),
        (
            {"task": "embed", "embedding": {"prompt": "", "prompt_name": "query"}},
            "embedding.prompt_name: given together with prompt",
        ),
        ({"slurm": {"time": "2:00"}}, 'slurm.time: "2:00" is 120 s, and a worker stops 120 s'),
        ({"slurm": {"time": "0-0:01"}}, 'slurm.time: "0-0:01" is 60 s'),
    ],
)
def test_keys_that_do_not_go_together_are_refused(sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(JobFileError) as refused:
        job_of({"name": "n", "model": "m", "input": {"path": "a"}, "output": {"path": "b"}, **sections})
    assert str(refused.value).startswith(problem)


def test_bounds_of_each_other_may_be_met() -> None:
    sections = {
        "sampling": {"n": 2, "best_of": 2, "min_tokens": 500},  # the model's own max_tokens may be as many
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 8},
        "slurm": {"time": "2:01"},
    }
    assert job_of({"name": "n", "model": "m", "input": {"path": "a"}, "output": {"path": "b"}, **sections})
