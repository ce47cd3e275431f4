"""Single ops of a CPU step beside what torch has for them: products, experts, log-probabilities; decode attention.

    OMP_NUM_THREADS=2 python -m tests.benchmarks.cpu_ops [--dtype bfloat16] [--record]

Products: a weight [O, I], so many copies of it that none is in a cache, as in a model; the libraries' are packed by
oneDNN (bf16) or plain (float32). Both take turns; GFLOP/s of the best round, and the median of the rounds' ratios.
Four bits: products with codes beside those with the same weights dequantized beforehand, and both in int8.
Experts: over weights in panels, beside torch's grouped product over plain ones, in ms; and of int8, beside the same
panels. Log-probabilities: those of a
step of 64 sequences, beside torch's softmax and top-k. Attention: one decoding token for each of some sequences, over
several layers' caches; GB/s of keys and values. The same over caches in fp8, in turns with those. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bulkrun.launch.threads import bound_spinning

bound_spinning()  # before torch is loaded, as in a real run

import torch  # noqa: E402

from bulkrun import ops  # noqa: E402
from bulkrun.models.config.model_config import ModelConfig  # noqa: E402
from bulkrun.models.kv_cache import KVCache  # noqa: E402
from bulkrun.ops.cpu.four_bit_linear import pack_four_bits_  # noqa: E402
from bulkrun.ops.cpu.int8_linear import pack_int8_  # noqa: E402
from bulkrun.ops.cpu.panel_linear import pack_panels, panel_linear  # noqa: E402
from bulkrun.ops.matmul.four_bit_linear import with_int8  # noqa: E402
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight, unpack  # noqa: E402
from bulkrun.ops.matmul.fp8 import FP8  # noqa: E402
from bulkrun.ops.matmul.int8_linear import Int8Weight, quantize_int8  # noqa: E402
from bulkrun.ops.matmul.linear import linear, pack_for_onednn  # noqa: E402
from bulkrun.ops.sampling.token_logprobs import token_logprobs  # noqa: E402
from tests.benchmarks.machine import commit, machine, record  # noqa: E402
from tests.models.paged_driver import make_metadata  # noqa: E402

WEIGHTS = ((1152, 384), (2048, 384), (384, 1024), (8192, 384), (4096, 1024), (6144, 1024), (1024, 3072))  # [O, I]
ROWS = (1, 4, 16, 64, 256)
EXPERTS = ((32, 4, 1024, 512), (64, 8, 2048, 1024))  # experts, chosen ones, hidden and inner size
VOCAB_SIZE, NUM_SAMPLING = 151_936, 64
ATTENTION = ((6, 2, 64), (16, 8, 128), (32, 8, 128))  # query heads, key heads, head dim
SEQUENCES, CONTEXT, LAYERS, BLOCK_SIZE = (4, 64), 200, 8, 16
LONG = (16, 2000)  # sequences, context: where keys and values are most of what a step reads
ROUNDS, COPIED_BYTES, ROUND_FLOP, GROUP_SIZE = 7, 200e6, 2e9, 128
Ways = dict[str, tuple[Callable[..., torch.Tensor], list[Any]]]  # an op, and its weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--record", action="store_true", help="append the result to history.jsonl")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    dtype, before = getattr(torch, args.dtype), machine()
    result = {
        "benchmark": "cpu_ops",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "products": [compare_products(size, dtype) for size in WEIGHTS],
        "four_bits": [compare_four_bits(size, dtype) for size in WEIGHTS],
        "experts": [compare_experts(sizes, dtype) for sizes in EXPERTS],
        "int8_experts": [compare_int8_experts(sizes, dtype) for sizes in EXPERTS],
        "token_logprobs": compare_logprobs(dtype),
        "attention": [measure_attention(heads, num, dtype) for heads in ATTENTION for num in SEQUENCES],
        "fp8_attention": [
            compare_fp8_attention(heads, num, context, dtype)
            for heads in ATTENTION
            for num, context in (*((num, CONTEXT) for num in SEQUENCES), LONG)
        ],
        "machine": before,
    }
    print(json.dumps(result))
    if args.record:
        record(result)


def compare_products(size: tuple[int, int], dtype: torch.dtype) -> dict[str, object]:
    """By number of rows: GFLOP/s of both, and how many times as fast panels are."""
    weights = copies(size, dtype)
    panels, packed = [pack_panels(weight) for weight in weights], [pack_for_onednn(weight) for weight in weights]
    ways: Ways = {"panels": (panel_linear, panels), "library": (linear, packed)}
    return {"weight": size, "by_rows": by_rows(ways, size, dtype)}


def compare_four_bits(size: tuple[int, int], dtype: torch.dtype) -> dict[str, object]:
    """The same of weights in four bits beside those dequantized beforehand, in `dtype` and in int8."""
    codes = [random_codes(size) for _ in copies(size, dtype)]
    plain = [unpack(weight) for weight in codes]
    ours = {
        "four_bits": (ops.four_bit_linear, [pack_four_bits_(cloned(weight)) for weight in codes]),
        "panels": (panel_linear, [pack_panels(weight.to(dtype)) for weight in plain]),
    }
    in_int8 = {
        "four_bits": (ops.four_bit_linear, [pack_four_bits_(with_int8(weight)) for weight in codes]),
        "panels": (ops.int8_linear, [pack_int8_(Int8Weight(*quantize_int8(weight))) for weight in plain]),
    }
    return {"weight": size, "by_rows": by_rows(ours, size, dtype), "int8_by_rows": by_rows(in_int8, size, dtype)}


def copies(size: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """A weight so many times that none is in a cache."""
    count = max(2, int(COPIED_BYTES / (size[0] * size[1] * dtype.itemsize)))
    return [torch.randn(size).to(dtype) for _ in range(count)]


def random_codes(size: tuple[int, int]) -> FourBitWeight:
    """A weight of whole numbers around zero, in groups."""
    codes = torch.randint(256, (size[0], size[1] // 2), dtype=torch.uint8)
    scale = torch.rand(size[0], size[1] // GROUP_SIZE) * 0.01
    return FourBitWeight(codes, scale, torch.full(scale.shape, 8, dtype=torch.uint8), torch.arange(16.0))


def cloned(weight: FourBitWeight) -> FourBitWeight:
    """With codes of its own."""
    return weight._replace(codes=weight.codes.clone())


def multiply_one(multiply: Callable[..., torch.Tensor], x: torch.Tensor, weights: list[Any], turn: int) -> torch.Tensor:
    """With each weight in turn."""
    return multiply(x, weights[turn % len(weights)], None)


def by_rows(ways: Ways, size: tuple[int, int], dtype: torch.dtype) -> dict[str, object]:
    """GFLOP/s of the best round of each, and how many times as fast the first is."""
    found: dict[str, object] = {}
    for rows in ROWS:
        x, flop = torch.randn(rows, size[1]).to(dtype), 2 * rows * size[0] * size[1]
        times: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, (multiply, weights) in ways.items():
                turns = max(len(weights), int(ROUND_FLOP / flop))
                times[way].append(seconds(partial(multiply_one, multiply, x, weights), turns))
        first, second = times.values()
        ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
        gflops = {way: round(flop / min(taken) / 1e9) for way, taken in times.items()}
        found[str(rows)] = gflops | {"times_as_fast": round(ratio, 2)}
    return found


def compare_experts(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, object]:
    """By number of tokens: both times in ms, and how many times as fast panels are."""
    plain = experts_of(sizes, dtype)
    panels = [ops.pack_experts(weight.clone(), ops.ExpertSizes(*sizes[2:])) for weight in plain]
    return {"experts": sizes, "by_tokens": by_tokens({"panels": panels, "torch": plain}, sizes, dtype)}


def compare_int8_experts(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> dict[str, object]:
    """By number of tokens: both times in ms, and how many times as fast int8 is."""
    plain = experts_of(sizes, dtype)
    int8 = [ops.pack_experts(Int8Weight(*quantize_int8(weight)), ops.ExpertSizes(*sizes[2:])) for weight in plain]
    panels = [ops.pack_experts(weight, ops.ExpertSizes(*sizes[2:])) for weight in plain]
    return {"experts": sizes, "by_tokens": by_tokens({"int8": int8, "panels": panels}, sizes, dtype)}


def experts_of(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Both weights."""
    num_experts, _, hidden, inner = sizes
    return [torch.randn(num_experts, *shape).to(dtype) * 0.02 for shape in ((2 * inner, hidden), (hidden, inner))]


def by_tokens(
    weights: dict[str, list[ops.ExpertWeights]], sizes: tuple[int, int, int, int], dtype: torch.dtype
) -> dict[str, object]:
    """The same tokens through each of two kinds of weights."""
    num_experts, top_k, hidden, _ = sizes
    found: dict[str, object] = {}
    for tokens in (*ROWS, 1024):
        x, logits = torch.randn(tokens, hidden).to(dtype), torch.randn(tokens, num_experts)
        routed = ops.route_top_k(logits, top_k, renormalize=True)
        found[str(tokens)] = beside({way: partial(ops.fused_experts, x, *of, *routed) for way, of in weights.items()})
    return found


def compare_logprobs(dtype: torch.dtype) -> dict[str, object]:
    """Both times in ms, and how many times as fast ours are."""
    logits, tokens = 3 * torch.randn(NUM_SAMPLING, VOCAB_SIZE).to(dtype), torch.arange(NUM_SAMPLING)
    ways = {"ours": partial(ops.token_logprobs, logits, tokens, 5), "torch": partial(token_logprobs, logits, tokens, 5)}
    return {"logits": list(logits.shape), **beside(ways)}


def beside(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The best time of each in ms, in turns, and the median of the rounds' ratios: the second's time by the first's."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, call in ways.items():
            times[way].append(seconds(lambda _, call=call: call(), 5))
    first, second = times.values()
    ratio = statistics.median(b / a for a, b in zip(first, second, strict=True))
    return {way: round(1e3 * min(taken), 3) for way, taken in times.items()} | {"times_as_fast": round(ratio, 2)}


def measure_attention(heads: tuple[int, int, int], num_seqs: int, dtype: torch.dtype) -> dict[str, object]:
    """GB/s of keys and values, read by one token of each sequence; blocks lie in any order."""
    attend = decoding(heads, num_seqs, CONTEXT, dtype, (dtype,))[0]
    taken = [seconds(attend, 4 * LAYERS) for _ in range(ROUNDS)]
    num_bytes = 2 * num_seqs * CONTEXT * heads[1] * heads[2] * dtype.itemsize
    middle = statistics.median(taken)
    speeds = {"ms": round(1e3 * middle, 3), "gb_s": round(num_bytes / middle / 1e9, 1)}
    return {"heads": heads, "sequences": num_seqs, "context": CONTEXT, **speeds}


def compare_fp8_attention(
    heads: tuple[int, int, int], num_seqs: int, context: int, dtype: torch.dtype
) -> dict[str, object]:
    """Both times of a layer in ms, and how many times as fast fp8 is."""
    fp8, own = (partial(each_layer, call) for call in decoding(heads, num_seqs, context, dtype, (FP8, dtype)))
    result = beside({"fp8": fp8, "own": own})
    times = {way: round(result[way] / LAYERS, 3) for way in ("fp8", "own")}
    return {"heads": heads, "sequences": num_seqs, "context": context, **result, **times}


def each_layer(call: Callable[[int], object]) -> None:
    """In order: what one has read is in no cache when its turn comes again."""
    for layer in range(LAYERS):
        call(layer)


def decoding(
    heads: tuple[int, int, int],
    num_seqs: int,
    context: int,
    dtype: torch.dtype,
    cache_dtypes: tuple[torch.dtype, ...],
) -> list[Callable[[int], torch.Tensor]]:
    """Attention of one token of each sequence in layer `i % LAYERS`, over caches of each of these dtypes."""
    blocks = -(-context // BLOCK_SIZE)
    tables = (torch.randperm(num_seqs * blocks) + 1).view(num_seqs, blocks).tolist()
    meta = make_metadata([(context - 1, context)] * num_seqs, tables, BLOCK_SIZE, num_seqs)
    q = torch.randn(num_seqs, heads[0], heads[2]).to(dtype)

    def attend(cache: KVCache, i: int) -> torch.Tensor:
        k, v = cache.k[i % LAYERS], cache.v[i % LAYERS]
        return ops.paged_attention(q, k, v, meta, scale=heads[2] ** -0.5, sliding_window=None)

    return [partial(attend, _filled_cache(heads, 1 + num_seqs * blocks, of)) for of in cache_dtypes]


def _filled_cache(heads: tuple[int, int, int], num_blocks: int, dtype: torch.dtype) -> KVCache:
    cache = KVCache.allocate(_config(heads), num_blocks, BLOCK_SIZE, dtype, "cpu")
    for layer in (*cache.k, *cache.v):
        layer.copy_(torch.randn(layer.shape).to(dtype))
    return cache


def _config(heads: tuple[int, int, int]) -> ModelConfig:
    """As much of a model as a KV cache must know."""
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": heads[0], "num_key_value_heads": heads[1]}
    raw = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "rms_norm_eps": 1e-6}
    raw |= {"hidden_size": 64, "intermediate_size": 64, "head_dim": heads[2], "max_position_embeddings": 4096}
    return ModelConfig.from_dict(raw | sizes)


def seconds(call: Callable[[int], object], turns: int) -> float:
    """Of one call, by the clock."""
    start = time.perf_counter()
    for i in range(turns):
        call(i)
    return (time.perf_counter() - start) / turns


if __name__ == "__main__":
    main()
