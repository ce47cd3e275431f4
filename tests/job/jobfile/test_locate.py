"""Errors found after the job file was read say where in it the key stands that they begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.errors import ModelError
from bulkrun.job.jobfile.locate import located

JOB = """\
name: try
model: nowhere
input: {path: [a, b]}
sampling:
  max_tokens: 5
"""


@pytest.mark.parametrize(
    ("said", "place"),
    [
        ("model: there is no such directory", "x.yaml:2:1: "),
        ("input.path[1]: is not there", "x.yaml:3:19: "),
        ("input.columns: the column 'row' cannot pass", "x.yaml:3:1: "),  # a key that would have to be set
        ("sampling.structured_outputs.json: not a schema", "x.yaml:4:1: "),
        ("sampling.max_tokens: 5 is too few", "x.yaml:5:3: "),
        ("engine.device: there is no GPU", ""),
        ("run.limit: is too much", "--set "),
        ("prompt.template: names no column", "--set "),
        ("config.json: is torn", ""),
        ("the model: is torn", ""),
    ],
)
def test_an_error_that_begins_with_a_key_gets_the_place_of_it_or_of_its_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(JOB)
    with pytest.raises(ModelError) as caught, located(Path("x.yaml"), ["run.limit=5", "prompt={template: x}"]):
        raise ModelError(f"{said}\nsecond line")
    assert str(caught.value) == f"{place}{said}\nsecond line"
