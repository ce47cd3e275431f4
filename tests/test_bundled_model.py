"""`bundled:tiny` as it is shipped: it loads everywhere, keeps its limits and answers in its own format."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parent.parent
TINY = ROOT / "bulkrun" / "bundled" / "tiny"
SOURCE = "def is_empty(self):\n    return len(self.items) == 0"
PROMPT_TEXT = (
    f"<|im_start|>user\nSummarize this Python code in one sentence:\n{SOURCE}<|im_end|>\n<|im_start|>assistant\n"
)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def tiny_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny_data", ROOT / "examples" / "tiny_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job_prompt(source: str) -> str:
    """What `jobs/summarize.yaml` makes of a row."""
    job = yaml.safe_load((ROOT / "jobs" / "summarize.yaml").read_text())
    return jinja2.Template(job["prompt"]["template"]).render(source=source)


def test_at_most_8_million_parameters_in_bfloat16_and_16_megabytes():
    (path,) = TINY.glob("*.safetensors")
    with safe_open(path, "pt") as file:
        tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert sum(tensor.numel() for tensor in tensors) <= 8_000_000
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    assert path.stat().st_size <= 16e6


def test_the_job_and_the_chat_template_make_the_prompt_of_training(tokenizer):
    messages = [{"role": "user", "content": job_prompt(SOURCE)}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == PROMPT_TEXT


def test_the_training_script_cuts_and_instructs_like_the_job(tiny_data, tmp_path):
    source = SOURCE + "\n    # more" * 100
    row = {"module": "m", "name": "f", "source": source, "docstring": "Whether it is empty."}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "f.parquet")
    (pair,) = [
        *tiny_data.read_split(tmp_path / "f.parquet").train,
        *tiny_data.read_split(tmp_path / "f.parquet").held_out,
    ]
    assert pair.prompt == job_prompt(source)


def test_held_out_modules_share_no_source_with_training(tiny_data, tmp_path):
    def row(module: str, source: str) -> dict[str, str]:
        return {
            "module": module,
            "name": "f",
            "source": source,
            "docstring": f"What the author of {module} says about it.",
        }

    modules = [f"m{i}" for i in range(300)]
    rows = [row(module, f"def f(): return {at}") for at, module in enumerate(modules)]
    rows += [row(module, "def  f():\n    return 1" + " " * at) for at, module in enumerate(modules)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "f.parquet")
    split = tiny_data.read_split(tmp_path / "f.parquet")
    assert {pair.module for pair in split.train}.isdisjoint(pair.module for pair in split.held_out)
    sources = [{tiny_data.squeezed(pair.source) for pair in side} for side in split]
    assert all(sources) and sources[0].isdisjoint(sources[1])


@pytest.mark.parametrize(
    ("paragraph", "summary"),
    [
        ("Return the :class:`~a.b.Thing` of ``x``", "Return the a.b.Thing of x."),
        ("Close the file. Args: name: it", "Close the file."),
        ("Sort the list. " + "And so on it goes, " * 20, "Sort the list."),
        ("Two words", None),
        ("frob(a, b) -> c", None),
        ("x = y ** 2 / 3 + 4 - 5 * 6 == 7", None),
    ],
)
def test_a_summary_is_whole_sentences_without_markup(tiny_data, paragraph, summary):
    assert tiny_data.summary_of(paragraph) == summary


def test_chat_template_knows_system_and_assistant_turns(tokenizer):
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant")]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    )


@pytest.mark.parametrize("text", [PROMPT_TEXT, "naïve – 日本 🙂\n\n\tx  =\r\n 1", "a\0b", " lead and trail "])
def test_tokenizer_alone_equals_transformers_and_gives_the_text_back(tokenizer, text):
    alone = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    ids = alone.encode(text, add_special_tokens=False).ids
    assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert alone.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_agree_between_the_files(tokenizer):
    config, generation = (json.loads((TINY / f"{name}.json").read_text()) for name in ("config", "generation_config"))
    assert tokenizer.eos_token == "<|im_end|>"
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.eos_token_id
    assert config["pad_token_id"] == generation["pad_token_id"] == tokenizer.pad_token_id
    assert config["vocab_size"] == len(tokenizer)
    assert generation.get("do_sample", False) is False


def test_transformers_loads_every_weight_and_a_summary_ends_by_itself(tokenizer):
    model, info = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    inputs = tokenizer(PROMPT_TEXT, add_special_tokens=False, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=48)[0, inputs["input_ids"].shape[1] :].tolist()
    assert ids[-1] == tokenizer.eos_token_id
    summary = tokenizer.decode(ids[:-1])
    assert len(summary.split()) >= 3, summary
    assert summary.endswith("."), summary
