"""What loading a checkpoint takes beside reading its files: `python -m tests.benchmarks.load_checkpoint MODEL_DIR`.

Alternates, cold (the files dropped from the page cache) and warm: reading the files into one buffer, and loading the
model. Prints one JSON line per round with wall seconds, CPU seconds and the peak of this process's own memory; the
first round of a process pays for importing and for the first product's set-up. `--write SIZE` makes the directory
first: a Llama of about SIZE GB with random weights, in shards of 1 GB; with `--packed LAYOUT` its projections are in 4
bits, groups of 128, and the files a quarter of that; `--packed mxfp4` makes a gpt-oss of the 20b's width.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.benchmarks.gpt_oss_checkpoint import write_gpt_oss
from tests.models.load import load_model

_HIDDEN, _INNER, _VOCAB, _HEADS, _KV_HEADS = 3072, 8192, 32000, 24, 8
_SHARD_BYTES = 10**9


_GROUP = 128
_QUANTIZATION: dict[str, dict[str, object]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": _GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"},
}


def write_checkpoint(path: Path, size_gb: float, packed: str | None = None) -> None:
    """A Llama of so many layers that its bf16 weights take about `size_gb`; `packed`: in a layout of 4 bits."""
    head_dim = _HIDDEN // _HEADS
    layer = {
        "self_attn.q_proj": (_HIDDEN, _HIDDEN),
        "self_attn.k_proj": (_KV_HEADS * head_dim, _HIDDEN),
        "self_attn.v_proj": (_KV_HEADS * head_dim, _HIDDEN),
        "self_attn.o_proj": (_HIDDEN, _HIDDEN),
        "mlp.gate_proj": (_INNER, _HIDDEN),
        "mlp.up_proj": (_INNER, _HIDDEN),
        "mlp.down_proj": (_HIDDEN, _INNER),
        "input_layernorm": (_HIDDEN,),
        "post_attention_layernorm": (_HIDDEN,),
    }
    layer_bytes = 2 * sum(torch.Size(shape).numel() for shape in layer.values())
    num_layers = max(1, round((size_gb * 10**9 - 4 * _VOCAB * _HIDDEN) / layer_bytes))
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(num_layers) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (_VOCAB, _HIDDEN), "lm_head.weight": (_VOCAB, _HIDDEN)}
    shapes["model.norm.weight"] = (_HIDDEN,)
    path.mkdir(parents=True, exist_ok=True)
    _write_shards(path, shapes, packed)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16"}
    config |= {"hidden_size": _HIDDEN, "intermediate_size": _INNER, "num_hidden_layers": num_layers}
    config |= {"num_attention_heads": _HEADS, "num_key_value_heads": _KV_HEADS, "vocab_size": _VOCAB}
    config |= {"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "max_position_embeddings": 4096}
    config |= {"hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": packed and _QUANTIZATION[packed]}))


def _write_shards(path: Path, shapes: dict[str, tuple[int, ...]], packed: str | None) -> None:
    noise = torch.randn(_VOCAB * _HIDDEN, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for number, (name, shape) in enumerate(shapes.items(), start=1):
        if packed and "_proj." in name:
            shard |= {name.replace("weight", part): tensor for part, tensor in _packed(shape, packed).items()}
        else:
            shard[name] = noise[: torch.Size(shape).numel()].clone().view(shape)
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES or number == len(shapes):
            file = f"model-{number:05d}.safetensors"
            save_file(shard, path / file)
            weight_map |= dict.fromkeys(shard, file)
            shard = {}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _packed(shape: tuple[int, ...], layout: str) -> dict[str, torch.Tensor]:
    """Random numbers of 4 bits in place of a weight [O, I]."""
    rows, columns = shape
    words = (columns // 8, rows) if layout == "gptq" else (columns, rows // 8)
    bounds, dtype = (-(2**31), 2**31 - 1), torch.int32
    return {
        "qweight": torch.randint(*bounds, words, dtype=dtype),
        "qzeros": torch.randint(*bounds, (columns // _GROUP, rows // 8), dtype=dtype),
        "scales": torch.full((columns // _GROUP, rows), 0.005, dtype=torch.float16),
    }


def drop_from_page_cache(files: list[Path]) -> None:
    """The next reads of these files come from the disk."""
    os.sync()
    for file in files:
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(files: list[Path]) -> None:
    """What `cat FILES > /dev/null` does."""
    buffer = bytearray(8 * 2**20)
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def measured(work: str, cache: str, num_bytes: int, action: Callable[[], object]) -> None:
    """Print what an action takes, and the most anonymous memory that it saw."""
    done, peak = threading.Event(), [0]
    watch = threading.Thread(target=_watch, args=(done, peak))
    watch.start()
    began, cpu = time.perf_counter(), time.process_time()
    action()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    done.set()
    watch.join()
    facts = {"work": work, "cache": cache, "seconds": round(wall_s, 2), "cpu_seconds": round(cpu_s, 2)}
    print(json.dumps(facts | {"gb_per_s": round(num_bytes / wall_s / 1e9, 2), "peak_mb": peak[0] // 1024}), flush=True)


def _watch(done: threading.Event, peak_kib: list[int]) -> None:
    while not done.wait(0.05):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak_kib[0] = max(peak_kib[0], *(int(line.split()[1]) for line in lines if line.startswith("RssAnon")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("--write", type=float, metavar="GB")
    parser.add_argument(
        "--packed", choices=[*sorted(_QUANTIZATION), "mxfp4"], help="with --write: the layout of its weights"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--quantization", choices=["fp8", "int8"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.write and options.packed == "mxfp4":
        write_gpt_oss(options.model, options.write)
    elif options.write:
        write_checkpoint(options.model, options.write, options.packed)
    files = sorted(options.model.glob("*.safetensors"))
    num_bytes = sum(file.stat().st_size for file in files)
    load = partial(
        load_model, options.model, dtype=torch.bfloat16, device=options.device, quantization=options.quantization
    )
    for _ in range(options.rounds):
        for cache in ("cold", "warm"):
            for work in ("read", "load"):
                if cache == "cold":
                    drop_from_page_cache(files)
                measured(work, cache, num_bytes, load if work == "load" else lambda: read(files))


if __name__ == "__main__":
    main()
