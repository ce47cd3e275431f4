"""What a LoRA adapter adds to loading: `python -m tests.benchmarks.load_adapter --workdir DIR`.

Writes a Llama of `--size` GB in bf16 and an adapter of rank 16 on all its projections, all random, where they are not
there yet, and loads the two in turns, warm. Prints one JSON line. A step takes what it takes without: it is the same
code over weights of the same form.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.loading.adapter import Adapter
from tests.benchmarks.load_checkpoint import write_checkpoint
from tests.benchmarks.machine import machine
from tests.models.load import load_model

_RANK = 16


def write_adapter(path: Path, model: Path) -> None:
    """An adapter of all projections of a model."""
    tensors = {}
    for one in stored_tensors(weight_files(model)):
        if one.name.endswith("_proj.weight"):
            name = f"base_model.model.{one.name.removesuffix('.weight')}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(_RANK, one.shape[1])
            tensors[f"{name}.lora_B.weight"] = torch.randn(one.shape[0], _RANK) * 0.01
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": 2 * _RANK, "target_modules": "all-linear"}
    (path / "adapter_config.json").write_text(json.dumps(config))


def seconds(model: Path, adapter: Path | None, device: str) -> float:
    """What one load takes."""
    began = time.perf_counter()
    load_model(model, dtype=torch.bfloat16, device=device, adapter=Adapter.of(adapter))
    return round(time.perf_counter() - began, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--size", type=float, default=2.0, help="GB of the model's weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    model, adapter = options.workdir / "model", options.workdir / "adapter"
    if not adapter.is_dir():
        write_checkpoint(model, options.size)
        write_adapter(adapter, model)
    seconds(model, adapter, options.device)  # the first products, the page cache
    pairs = [(seconds(model, None, options.device), seconds(model, adapter, options.device))
             for _ in range(options.rounds)]  # fmt: skip
    plain, adapted = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(json.dumps({**machine(), "size_gb": options.size, "plain_s": plain, "adapted_s": adapted, "rounds": pairs}))


if __name__ == "__main__":
    main()
