"""The tokens that end an output, wherever a model directory names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import bulkrun
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT

ASKED = [[{"role": "user", "content": "Summarize this Python code in one sentence:\ndef close(self):\n    pass"}]]
SAMPLING = {"temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def answer() -> str | None:
    [output] = bulkrun.LLM("bundled:tiny", dtype="float32").chat(ASKED, SAMPLING)
    assert output.finish_reason == "stop"
    return output.text


@pytest.mark.parametrize("named", [0, None], ids=["another token", "nothing"])
def test_the_tokenizers_end_ends_an_output_whatever_the_models_files_name(
    named: int | None, answer: str | None, tmp_path: Path
) -> None:
    """Who teaches a model to end its turns changes the tokenizer, and often no other file."""
    model = tmp_path / "model"
    shutil.copytree(BUNDLED_ROOT / "tiny", model)
    for name in ("config.json", "generation_config.json"):
        keys = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(keys | {"eos_token_id": named}))
    [output] = bulkrun.LLM(model, dtype="float32").chat(ASKED, SAMPLING)
    assert (output.text, output.finish_reason) == (answer, "stop")
    sampling = SAMPLING | {"structured_outputs": {"regex": "[a-z]{1,3}"}}
    [bound] = bulkrun.LLM(model, dtype="float32").chat(ASKED, sampling)
    assert bound.finish_reason == "stop" and 1 <= len(bound.text or "") <= 3
