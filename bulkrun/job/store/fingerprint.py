"""What makes a run this run: the settings and facts its results depend on, as readable values and as hashes.

The engine's settings, the pace of the run (`checkpoint_every`, `max_error_rate`) and texts for people are not part of
it; where a setting makes another model (random or 8-bit numbers), that is one of the facts. Facts about files (input,
model) are handed in as data: this module reads nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

from bulkrun.settings import Task

Facts = Mapping[str, Any]

# Keys whose change leaves every result as it was: --resume-anyway accepts them.
HARMLESS = ("model.name", "input.path", "input.on_duplicate", "plan.window_rows", "plan.rows_per_file")

# What the file of a chat template says, and what every tensor of a classifier begins with, as hashes. A record of an
# earlier bulkrun, and of a job that has no such thing, has none.
CHAT_TEMPLATE, TENSORS = "chat_template_file", "tensors"
ADAPTERS = "adapters"  # of the model: a hash of each, by the names that rows give
_LATER = (f"prompt.{CHAT_TEMPLATE}", f"model.{TENSORS}")

# How jobs are that know nothing of a key that came later.
_BEFORE: tuple[tuple[str, Any], ...] = (
    *(("text_pair", None), ("score_lines", False), ("text_lists", False)),
    *(("tools", None), ("tool_choice", "auto"), ("continue_final_message", False)),
    ("token_ids", None),
)
_BEFORE_CALLS = (("tool_calls", None), ("tool_call_id", None))
_BEFORE_SAMPLING: tuple[tuple[str, Any], ...] = (
    *(("tool_calls", None), ("logprobs_over", "vocabulary")),
    *(("logit_bias", None), ("bad_words", []), ("allowed_token_ids", None), ("include_stop_str_in_output", False)),
    ("return_token_ids", False),
)

_SECTION_OF_TASK: Mapping[Task, str] = {"embed": "embedding", "classify": "classification"}
_OF_ENGINE = ("load_format", "adapter", "quantization", "kv_cache_dtype", "deterministic")  # and make another model
# Where the job file has keys that count for another section here, for people.
_KEYS = {
    "model.name": "model",
    "input.limit": "run.limit",
    f"prompt.{CHAT_TEMPLATE}": "prompt.chat_template",
    "prompt.on_too_long": "run.on_too_long",
    "prompt.max_tokens_per_row": "run.max_tokens_per_row",
    "embedding.task": "task",
    "classification.task": "task",
    "output.columns": "input.columns",
    "output.incremental": "run.incremental",
    "plan.window_rows": "run.window_rows",
    "plan.rows_per_file": "output.rows_per_file",
    **{f"model.{name}": f"engine.{name}" for name in _OF_ENGINE},
}


def job_key(key: str) -> str:
    """A dotted key of an identity as the job file has it."""
    return key.replace("model.", "engine.", 1) if key.startswith(f"model.{ADAPTERS}.") else _KEYS.get(key, key)


def identity_of(
    job: Mapping[str, Any], input_facts: Facts, model_facts: Facts, prompt_facts: Facts
) -> dict[str, dict[str, Any]]:
    """The part of a resolved job (as `JobSpec.model_dump()`) that results depend on, in sections.

    The facts say what the files hold (sizes, hashes), so that an edited file under the same name is noticed, and a
    moved one is not taken for a change.
    """
    given, run, output = job["input"], job["run"], job["output"]
    names = ("path", "sql", "id", "on_duplicate", "max_row_bytes", "delimiter")
    return {
        "model": {"name": job["model"], **model_facts},
        "input": {name: given[name] for name in names} | {"limit": run["limit"], **_adapter(given), **input_facts},
        "prompt": _prompt(job["prompt"])
        | {"on_too_long": run["on_too_long"], "max_tokens_per_row": run["max_tokens_per_row"], **prompt_facts},
        "sampling": _sampling(job["sampling"]),
        **_of_task(job),
        "output": {"columns": _carried(given), "partition_by": output["partition_by"]}
        | ({"incremental": True} if run["incremental"] else {}),
        "plan": {"window_rows": run["window_rows"], "rows_per_file": output["rows_per_file"]},
    }


def _adapter(given: Mapping[str, Any]) -> dict[str, str]:
    """A job without the column stays what it was before there was one."""
    return {} if given.get("adapter") is None else {"adapter": given["adapter"]}


def _prompt(given: Mapping[str, Any]) -> dict[str, Any]:
    """The template's values count as text: a template tells true from 1, and a null from what is not there; and tools
    in their order, in which it shows them. A job without pairs and tools stays what it was before there were any."""
    made = {**given, "chat_template_kwargs": json.dumps(given["chat_template_kwargs"], sort_keys=True)}
    if isinstance(given.get("tools"), list):
        made["tools"] = json.dumps(given["tools"])
    if isinstance(given["messages"], list):
        made["messages"] = [_message(message) for message in given["messages"]]
    return {key: value for key, value in made.items() if (key, value) not in _BEFORE}


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """Without calls it stays what it was before there were any; those are shown in their order."""
    made = {key: value for key, value in given.items() if (key, value) not in _BEFORE_CALLS}
    return made | ({} if made.get("tool_calls") is None else {"tool_calls": json.dumps(made["tool_calls"])})


def _carried(given: Mapping[str, Any]) -> list[str] | None:
    """The input's columns in the output: those chosen, and always the one that names a row."""
    columns, name = given["columns"], given["id"]
    return columns if columns is None or name is None or name in columns else [name, *columns]


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """A JSON schema counts as text: outputs are written in the order of its properties, which a hash would not see."""
    given = {key: value for key, value in given.items() if (key, value) not in _BEFORE_SAMPLING}
    structured = given.get("structured_outputs") or {}
    if not structured.get("json"):
        return given
    return {**given, "structured_outputs": {**structured, "json": json.dumps(structured["json"])}}


def _of_task(job: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A job that generates has no such section: it stays what it was before there were others."""
    name = _SECTION_OF_TASK.get(task := task_of(job))
    return {} if name is None else {name: {"task": task, **job[name]}}


def task_of(job: Mapping[str, Any]) -> Task:
    """What a job makes of its rows. One that an earlier version recorded has no `task`."""
    task: Task = job.get("task", "generate")
    return task


class KeySalt(NamedTuple):
    """What results depend on beside their own rows: a hash of what all have in common, and one of each adapter that a
    row may name."""

    common: str
    adapters: Mapping[str, str] = MappingProxyType({})


def key_salt(identity: Mapping[str, Mapping[str, Any]]) -> KeySalt:
    """In common they have the weights (not where they lie), the sampling, and of vectors how they are made."""
    common: dict[str, Mapping[str, Any]] = {}
    model = identity["model"]
    common["model"], common["sampling"] = {**model, "name": None, ADAPTERS: None}, identity["sampling"]
    for name in _SECTION_OF_TASK.values():
        common[name] = identity.get(name, {})
    of_pairs = {"text_pair", "score_lines"} & identity["prompt"].keys()
    if of_pairs:  # a model may read the same tokens otherwise where they are of two texts
        common["prompt"] = {"has_text_pair": True}
    # What is not set counts for nothing, so that a key that a later version knows does not make all rows new.
    hashed = fingerprint({key: value for key, value in _flatten(common) if value not in (None, [])})
    return KeySalt(hashed, model.get(ADAPTERS) or {})


def fingerprint(value: Any) -> str:
    """A 128-bit hash of a JSON value, the same in every process."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)
    return blake2b(canonical.encode(), digest_size=16).hexdigest()


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted keys whose values differ, with both values (None where there is none), in the order of `new`."""
    flat_old, flat_new = dict(_flatten(old)), dict(_flatten(new))
    keys = [*flat_new, *(key for key in flat_old if key not in flat_new)]
    both = {key: (flat_old.get(key), flat_new.get(key)) for key in keys if flat_old.get(key) != flat_new.get(key)}
    return {key: values for key, values in both.items() if key not in _LATER or None not in values}


def _flatten(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, entry in value.items():
        if isinstance(entry, Mapping):
            yield from _flatten(entry, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", entry
