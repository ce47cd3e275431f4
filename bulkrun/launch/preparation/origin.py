"""What a run's results come from, as facts of its record: the model's and its adapter's files, a chat template's file.

With other facts it is another run. Reads files; knows no input and no results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.chat_source import named_template, names_file
from bulkrun.job.store.fingerprint import ADAPTERS, CHAT_TEMPLATE, TENSORS, fingerprint
from bulkrun.models.config.model_dir import adapter_fingerprint, model_fingerprint, tensors_fingerprint
from bulkrun.models.files.weight_files import refuse_missing_weights


def prompt_facts(prompt: PromptSpec) -> dict[str, str]:
    """Of prompts: the hash of the chat template that the job names by its file."""
    return {CHAT_TEMPLATE: fingerprint(named_template(prompt))} if names_file(prompt) else {}


def model_facts(spec: JobSpec, model_dir: Path, adapters: Mapping[str, Path]) -> dict[str, Any]:
    """Of the model: random or 8-bit numbers are another model, not another engine. `adapters` as in `PreparedJob`.

    How a checkpoint stores its numbers is in its fingerprint; whether a device multiplies those in 8 bits as they are
    or dequantizes them is the engine's, as its dtype is. Raises ModelError where weights are missing: with them it
    would be another model, under a run that is there.
    """
    engine = spec.engine
    if engine.load_format != "dummy":
        refuse_missing_weights(model_dir)
    facts: dict[str, Any] = {"fingerprint": model_fingerprint(model_dir)}
    if spec.task == "classify":
        facts[TENSORS] = tensors_fingerprint(model_dir)
    prints = {name: adapter_fingerprint(adapter) for name, adapter in adapters.items()}
    if "" in prints:
        facts["adapter"] = prints[""]
    elif prints:
        facts[ADAPTERS] = prints
    if engine.load_format == "dummy":
        facts["load_format"] = "dummy"
    if engine.quantization is not None:
        facts["quantization"] = engine.quantization
    if engine.kv_cache_dtype == "fp8":
        facts["kv_cache_dtype"] = "fp8"
    if engine.deterministic:  # rows of another mode, dtype or device beside the others would break the promise
        bits = ("dtype", "device", "kv_cache_dtype")
        facts["deterministic"] = ", ".join(f"{name} {getattr(engine, name)}" for name in bits)
    return facts
