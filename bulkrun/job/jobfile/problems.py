"""What is wrong with a job, in plain words: pydantic's errors turned into (path, what, did you mean). Knows no YAML."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from bulkrun.errors import did_you_mean, shortened
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.request import ABSENT

Path = tuple[str | int, ...]


class SpecProblem(NamedTuple):
    """One problem at a path of the job (the path of a missing key is the key's, though it is not there)."""

    path: Path
    what: str


_WANTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a section of keys and values",
    "model_type": "a section of keys and values",
    "model_attributes_type": "a section of keys and values",
}
# The key that a text in the place of a whole section is meant for.
_LONE_TEXTS = {"input": "path", "output": "path", "prompt": "template"}
_GUIDED = ("json", "regex", "choice", "grammar")
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}

_ADAPTERS = (
    "write engine.adapter: DIRECTORY (from Python LLM(model, adapter=...)); engine.adapters is for several of them"
)
# Keys of vLLM's and other runners' configurations that have another name, or no counterpart, here.
_ELSEWHERE = {
    **{f"guided_{kind}": f"write sampling.structured_outputs: {{{kind}: ...}}" for kind in _GUIDED},
    "guided_decoding": "write sampling.structured_outputs",
    "response_format": "write sampling.structured_outputs: {json: ...}",
    "tensor_parallel_size": "a model runs on one GPU; run.workers starts several, one for each GPU",
    "pipeline_parallel_size": "a model runs on one GPU; run.workers starts several, one for each GPU",
    "data_parallel_size": "write run.workers: one worker for each GPU",
    **dict.fromkeys(("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "max_cpu_loras"), _ADAPTERS),
    "max_new_tokens": "write sampling.max_tokens",
    "max_completion_tokens": "write sampling.max_tokens",
    "do_sample": "write sampling.temperature: 0 for greedy outputs, more for sampled ones",
    "batch_size": "write engine.max_num_seqs: the maximum number of sequences running at once",
    **ABSENT,
    "add_generation_prompt": "a job's prompts ask for an answer; prompt.continue_final_message goes on with one",
    "bad_words_ids": "write sampling.bad_words, with the words themselves",
    **dict.fromkeys(("runner", "task_type", "convert"), "write task: embed for vectors, task: classify for labels"),
    **dict.fromkeys(("truncate_dim", "output_dimension"), "write embedding.dimensions"),
    **dict.fromkeys(("pooling_type", "pooling_mode", "override_pooler_config"), "write embedding.pooling"),
    "normalize_embeddings": "write embedding.normalize",
    **dict.fromkeys(("function_to_apply", "activation_fn"), "write classification.activation"),
    **dict.fromkeys(("id2label", "candidate_labels"), "write classification.labels"),
    **dict.fromkeys(("hypothesis_template", "text_2", "documents"), "write prompt.text_pair, with task: classify"),
    "trust_remote_code": "code that comes with a model is never run",
}


def spec_problems(values: dict[str, Any], error: ValidationError) -> list[SpecProblem]:
    """The problems of `values` that `error` found, one for each place."""
    found: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False):
        found.setdefault(_path_in(values, details), []).append(details)
    # An alternative of a union that fails as a whole says nothing where another one got further.
    deepest = [path for path in found if not any(other[: len(path)] == path and other != path for other in found)]
    kept = [path for path in found if path in deepest or not _is_union_error(found[path], path)]
    return [_problem(path, found[path]) for path in kept]


def _problem(path: Path, errors: Sequence[ErrorDetails]) -> SpecProblem:
    problem = SpecProblem(path, _describe(path, errors))
    return _narrowed(problem) if errors[0]["type"] == "value_error" else problem


def _narrowed(problem: SpecProblem) -> SpecProblem:
    """A check of several keys of a section begins with the one that it blames, and a colon: its place is there."""
    key, _, what = problem.what.partition(": ")
    if _find_field(section_at(problem.path), key.split(".")) is None:
        return problem
    return SpecProblem((*problem.path, *key.split(".")), what)


def _path_in(values: Any, details: ErrorDetails) -> Path:
    """The error's place in the data: its `loc` without the names of union alternatives."""
    path: Path = ()
    here = values
    for part in details["loc"]:
        if (isinstance(here, dict) and part in here) or (isinstance(here, list) and isinstance(part, int)):
            here = here[part]  # type: ignore[index]
            path = (*path, part)
    return (*path, details["loc"][-1]) if details["type"] == "missing" else path


def _is_union_error(errors: Sequence[ErrorDetails], path: Path) -> bool:
    return any(len(details["loc"]) > len(path) for details in errors)


def _describe(path: Path, errors: Sequence[ErrorDetails]) -> str:
    details = errors[0]
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return f"is missing. {_described(path)}"
    if kind == "value_error":
        return str(context["error"])
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        return f"{shown(details['input'])} is out of range: {words} {context[name]:g} is wanted"
    if kind == "literal_error":
        return _not_one_of(details["input"], str(context["expected"]))
    if kind == "too_short":
        return f"is an empty list. {_described(path)}"
    if kind in _WANTED and all(one["type"] != "string_pattern_mismatch" for one in errors):
        wanted = list(dict.fromkeys(_wanted(errors)))
        return _no_value(path, wanted) if details["input"] is None else _wrong_type(path, details["input"], wanted)
    return f"{shown(details['input'])} cannot be used here. {_described(path)}"


def _described(path: Path) -> str | None:
    """What the key at `path` is; the item of a list is what its key says."""
    *section, key = (part for part in path if isinstance(part, str))
    return field_of(section_at(tuple(section)), key).description


def _wanted(errors: Sequence[ErrorDetails]) -> Iterator[str]:
    for details in errors:
        yield _WANTED.get(details["type"], details["msg"])


def _no_value(path: Path, wanted: list[str]) -> str:
    field = _find_field(JobSpec, [part for part in path if isinstance(part, str)])
    is_optional = isinstance(path[-1], str) and (field is None or not field.is_required())  # None: a mapping's own key
    return f"has no value; {' or '.join(wanted)} is wanted" + (" (or leave the key out)" if is_optional else "")


def _wrong_type(path: Path, value: Any, wanted: list[str]) -> str:
    fix = ""
    if "text" in wanted and isinstance(value, bool | int | float):
        fix = f'; quote it: "{shown(value)}"'
    elif wanted == ["a list"] and isinstance(value, str | int | float):
        fix = f"; write [{shown(value)}]"
    elif isinstance(value, str) and len(path) == 1 and path[0] in _LONE_TEXTS:
        fix = f"; write {path[0]}: {{{_LONE_TEXTS[path[0]]}: {shown(value)}}}"
    elif isinstance(value, list) and path == ("input",):
        fix = "; write input: {path: [...]}, with the files in it"
    elif isinstance(value, str) and "text" not in wanted and _is_number_or_bool(value):
        fix = f"; remove the quotes: {value}"
    return f"{shown(value)} is not {' or '.join(wanted)}{fix}"


def _is_number_or_bool(text: str) -> bool:
    try:
        return isinstance(json.loads(text), int | float)
    except ValueError:
        return False


def _not_one_of(value: Any, expected: str) -> str:
    choices = expected.replace("'", "").replace(" or ", ", ").split(", ")
    near = did_you_mean(str(value), choices, str)
    return f"{shown(value)} is not one of {', '.join(choices)}" + (f"; {near}" if near else "")


def _unknown_key(path: Path) -> str:
    key, section = str(path[-1]), section_at(path[:-1])
    elsewhere = _sections_with(key)
    if elsewhere:
        return f"unknown key here; {key} belongs to {' or '.join(elsewhere)}"
    if key in _ELSEWHERE:
        return f"unknown key; {_ELSEWHERE[key]}"
    if near := did_you_mean(key, keys_of(section), str):
        return f"unknown key, {near}"
    return f"unknown key; these are known here: {', '.join(keys_of(section))}"


def _sections_with(key: str) -> list[str]:
    """The places of the job that know `key`, as the user would write them."""
    sections = {name: _model_in(field.annotation) for name, field in JobSpec.model_fields.items()}
    found = ["the top level (no indentation)"] if key in sections else []
    return found + [f"{name}:" for name, model in sections.items() if model and key in model.model_fields]


def wants_text(path: Path) -> bool:
    """Whether the value of the key at `path` is a text and can be nothing else."""
    field = _find_field(JobSpec, [str(part) for part in path])
    return field is not None and field.annotation in (str, str | None)


def section_at(path: Path) -> type[BaseModel]:
    """The model that holds the keys at `path`: the job itself for ()."""
    model: type[BaseModel] = JobSpec
    for part in path:
        if isinstance(part, str):
            field = field_of(model, part)
            model = _model_in(field.annotation) or model
    return model


def keys_of(model: type[BaseModel]) -> list[str]:
    """The keys that a section of the job file knows."""
    return [field.alias or name for name, field in model.model_fields.items()]


def field_of(model: type[BaseModel], key: str) -> FieldInfo:
    """The field that a key of the job file stands for (an alias is the key where a field has one)."""
    return next(field for name, field in model.model_fields.items() if key in (field.alias, name))


def _find_field(section: type[BaseModel], keys: Sequence[str]) -> FieldInfo | None:
    """The field that `keys`, one below the other, lead to; None where one of them is unknown."""
    field = None
    for key in keys:
        if key not in keys_of(section):
            return None
        field = field_of(section, key)
        section = _model_in(field.annotation) or section
    return field


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section among the alternatives of a type, None when it has none."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


def shown(value: Any) -> str:
    """A value as it would stand in YAML, cut to one short line."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    return shortened(json.dumps(value, ensure_ascii=False, default=str))
