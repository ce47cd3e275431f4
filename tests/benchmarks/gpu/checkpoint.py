"""Loading a large checkpoint from disk: `python -m tests.benchmarks.gpu.checkpoint write|first-token DIR [DEVICE]`.

`write` makes a checkpoint of a shape with arbitrary numbers, in shards. `first-token` loads a directory and generates
one token, and prints how long each part took since the process began.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

_SHARD_BYTES = 2 * 2**30
_READ_BYTES = 16 * 2**20
_RANDOM_NUMBERS = 2**22


def write(folder: Path, shape: str) -> None:
    """Shards of at most 2 GiB and their index, as large checkpoints have them. About 16 GB for llama-3.1-8b."""
    import torch
    from safetensors.torch import save_file

    from bulkrun.launch.bench.shapes import write_shape
    from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
    from bulkrun.models.decoder.decoder import Decoder
    from bulkrun.models.loading.tensor_names import targets

    folder.mkdir(parents=True, exist_ok=True)
    config = ModelConfig.from_dir(write_shape(shape, folder, dtype="bfloat16", max_model_len=4096))
    assert isinstance(config, DecoderConfig), "shapes are the decoder's"
    with torch.device("meta"):
        model = Decoder(config)
    block = (torch.randn(_RANDOM_NUMBERS) * 0.02).bfloat16()  # again and again: 8 billion would take minutes
    shard: dict[str, Any] = {}
    weight_map: dict[str, str] = {}
    size = number = 0
    for name, target in targets(model, stored={}):  # in the layout of experts that is published
        num_elements = math.prod(target.shape)
        repeats = -(-num_elements // block.numel())
        shard[name] = block.repeat(repeats)[:num_elements].view(target.shape)
        weight_map[name] = f"model-{number:05d}.safetensors"
        size += shard[name].nbytes
        if size > _SHARD_BYTES:
            save_file(shard, folder / weight_map[name])
            shard, size, number = {}, 0, number + 1
    if shard:
        save_file(shard, folder / f"model-{number:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")


def first_token(folder: Path, device: str) -> dict[str, float]:
    """Seconds since this process began: until torch was there, the model was loaded, the first token generated."""
    began = _process_start()
    from bulkrun.engine.llm_engine import LLMEngine
    from bulkrun.request import Request, SamplingParams

    imported = time.time()
    engine = LLMEngine.from_model_dir(folder, device=device, max_model_len=4096)
    loaded = time.time()
    engine.add_request(Request("0", [1] * 64, SamplingParams(max_tokens=1, ignore_eos=True)))
    while engine.has_unfinished():
        engine.step()
    done = time.time()
    return {
        "import_s": round(imported - began, 2),
        "load_s": round(loaded - imported, 2),
        "first_token_s": round(done - began, 2),
    }


def drop_from_page_cache(folder: Path) -> None:
    """So that the next reader has to ask the disk."""
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def read_all(folder: Path) -> tuple[float, int]:
    """Seconds and bytes of reading every shard once, one after another, and doing nothing with it."""
    buffer, num_bytes, start = bytearray(_READ_BYTES), 0, time.perf_counter()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                num_bytes += count
    return time.perf_counter() - start, num_bytes


def _process_start() -> float:
    """When this process began, on the clock of `time.time`."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text(encoding="utf-8").split()[0])
    return time.time() - (uptime - ticks / os.sysconf("SC_CLK_TCK"))


if __name__ == "__main__":
    command, place, last = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if command == "write":
        write(place, last)
    else:
        print(json.dumps(first_token(place, last)))
