"""The keys of a job file for people: none is missing, and each says what comes of leaving it out."""

from __future__ import annotations

import pytest

from bulkrun.errors import UsageError
from bulkrun.job.jobfile.load import job_schema
from bulkrun.job.jobfile.reference import Key, keys_below

# Exactly one of these is given: there is nothing to say of one that is not.
_ONE_OF = tuple(f"sampling.structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar"))


def test_every_key_of_every_section_is_there_once() -> None:
    schema = job_schema()
    names = [key.key for key in keys_below(schema)]
    assert len(names) == len(set(names))
    in_sections = sum(len(section["properties"]) for section in schema["$defs"].values())
    assert len(names) == len(schema["properties"]) + in_sections


def test_a_key_without_a_value_of_its_own_says_what_its_default_is() -> None:
    silent = [key.key for key in keys_below(job_schema()) if not key.default and "Default:" not in key.description]
    assert silent == list(_ONE_OF)


def test_types_and_defaults_read_as_they_are_written() -> None:
    shown = {key.key: key[1:3] for key in keys_below(job_schema())}
    assert shown["name"] == ("text", "required")
    assert shown["sampling"] == ("section", "{}")
    assert shown["sampling.temperature"] == ("number", "")
    assert shown["sampling.stop"] == ("text or list of text", "")
    assert shown["engine.batching"] == ("continuous, static, dynamic", "continuous")
    assert shown["engine.deterministic"] == ("true or false", "false")
    assert shown["prompt.messages"] == ("list of section or text", "")
    assert shown["prompt.messages[].role"] == ("system, user, assistant, tool", "required")
    assert shown["slurm.gpus"] == ("whole number or text", "")
    assert shown["sampling.per_row"] == ("mapping", "{}")


def test_a_section_is_itself_and_what_is_in_it() -> None:
    [section, *inner] = keys_below(job_schema(), "ray")
    assert section == Key("ray", "section", "{}", "How Ray places the workers.")
    assert [key.key for key in inner] == ["ray.address", "ray.gpus", "ray.cpus"]
    with pytest.raises(UsageError, match=r"'sampling\.temprature' is not a section .* sampling\.temperature\?"):
        keys_below(job_schema(), "sampling.temprature")
    with pytest.raises(UsageError, match="there are name, model, task, input"):
        keys_below(job_schema(), "§")
