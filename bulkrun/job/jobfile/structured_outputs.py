"""`sampling.structured_outputs`: what every output must look like, and how that becomes the engine's parameter."""

from __future__ import annotations

import json
from typing import Any

from pydantic import ConfigDict, Field, model_validator

from bulkrun.job.jobfile.section import Section
from bulkrun.request import StructuredOutput


class StructuredOutputsSpec(Section):
    """What every output must look like: exactly one of `json`, `regex`, `choice`, `grammar`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, serialize_by_alias=True)

    # `json` is vLLM's name; as an attribute it would hide a method of pydantic's models.
    json_schema: dict[str, Any] | str | None = Field(
        None,
        alias="json",
        description="A JSON schema, or the path of a .json file with one. The result gets a typed column `parsed`. "
        "Objects have the declared properties, and others only if additionalProperties allows them.",
    )
    regex: str | None = Field(None, description="A regular expression that the whole output matches.")
    choice: list[str] | None = Field(None, min_length=1, description="The output is one of these texts.")
    grammar: str | None = Field(
        None, description="A grammar: Lark, whose `start` rule is the whole output, or GBNF, whose `root` is."
    )

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputsSpec:
        given = [name for name in ("json_schema", "regex", "choice", "grammar") if getattr(self, name) is not None]
        if len(given) != 1:
            have = " and ".join(given).replace("json_schema", "json") or "none of them"
            raise ValueError(f"needs exactly one of json, regex, choice, grammar; has {have}")
        return self

    def to_param(self) -> StructuredOutput:
        """The engine's parameter. A schema that is a path must have been read before (by `prepare`)."""
        if self.json_schema is not None:
            assert isinstance(self.json_schema, dict), "a schema's path is read when the job is prepared"
            return StructuredOutput("json", json.dumps(self.json_schema))
        if self.regex is not None:
            return StructuredOutput("regex", self.regex)
        if self.choice is not None:
            return StructuredOutput("choice", json.dumps(self.choice))
        assert self.grammar is not None, "one of the four is given"
        return StructuredOutput("grammar", self.grammar)
