"""Every Triton op on a GPU: time, GB/s and FLOP/s beside its torch reference and beside what the device can do.

    python -m tests.benchmarks.gpu_ops [--only decode] [--head-dim 128] [--tokens 4096] [--smoke]

Prints JSON lines: first the device, its copy bandwidth and bf16 GEMM rate measured in the same run, then for each case
the median of CUDA-event times with a cold L2, the bytes and FLOPs the op cannot do without (not those it does), and the
share of the ceiling that binds. Where a case has a rival (the reference, or torch's own attention on contiguous KV),
its time is there too: compare ratios of one run only. Exits 1 where there is no CUDA device, except with `--smoke`:
tiny cases on a CPU, to see that the script works.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import torch
import torch.nn.functional as F

from bulkrun import ops
from bulkrun.ops import AttentionMetadata
from bulkrun.ops.matmul.fp8 import FP8
from tests.benchmarks.gpu_case import BLOCK_SIZE, BYTES, TINY, Case, Sizes, make_step
from tests.benchmarks.gpu_encoder_cases import encoder_cases
from tests.benchmarks.gpu_expert_cases import expert_cases
from tests.benchmarks.gpu_four_bit_cases import four_bit_cases
from tests.benchmarks.gpu_latent_cases import latent_cases
from tests.benchmarks.gpu_state_cases import state_cases
from tests.benchmarks.gpu_stream_cases import stream_cases
from tests.ops.prefix_groups import prefixes_of


def elementwise_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Ops that are all memory: each tensor read or written once."""
    tokens, width = sizes.num_tokens, sizes.hidden_size
    x, residual = torch.randn(2, tokens, width, device=device, dtype=torch.bfloat16)
    weight = torch.rand(width, device=device, dtype=torch.bfloat16)
    num_bytes = BYTES * tokens * width
    yield _beside_reference("rms_norm", ops.rms_norm, (x, weight, 1e-6), 2 * num_bytes)
    yield _beside_reference("add_rms_norm", ops.add_rms_norm, (x, residual, weight, 1e-6), 4 * num_bytes)
    gate_up = torch.randn(tokens, 2 * sizes.intermediate_size, device=device, dtype=torch.bfloat16)
    num_bytes = 3 * BYTES * tokens * sizes.intermediate_size
    yield _beside_reference("silu_mul", ops.silu_mul, (gate_up,), num_bytes)
    yield _norm_rotary_store_case(sizes, device)


def _norm_rotary_store_case(sizes: Sizes, device: str) -> Case:
    tokens, heads, dim = sizes.num_tokens, sizes.num_heads + 2 * sizes.num_kv_heads, sizes.head_dim
    qkv = torch.randn(tokens, heads, dim, device=device, dtype=torch.bfloat16)
    weight = torch.rand(heads - sizes.num_kv_heads, dim, device=device, dtype=torch.bfloat16)
    inv_freq = 1e4 ** (-torch.arange(0, dim, 2, device=device) / dim)
    cos, sin = ops.rotary_cos_sin(torch.arange(tokens, device=device), inv_freq, 1.0, torch.bfloat16)
    shape = (tokens // BLOCK_SIZE + 1, BLOCK_SIZE, sizes.num_kv_heads, dim)
    k_cache, v_cache = torch.zeros(2, *shape, device=device, dtype=torch.bfloat16)
    args = (qkv, weight, 1e-6, cos, sin, k_cache, v_cache, torch.randperm(tokens, device=device))
    return _beside_reference("norm_rotary_store", ops.norm_rotary_store, args, 2 * qkv.numel() * BYTES)


def product_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """The model's products at the row counts of steps; a step of few rows is all weights."""
    heads, dim, hidden = sizes.num_heads, sizes.head_dim, sizes.hidden_size
    shapes = {
        "qkv_proj": (hidden, (heads + 2 * sizes.num_kv_heads) * dim),
        "o_proj": (heads * dim, hidden),
        "gate_up_proj": (hidden, 2 * sizes.intermediate_size),
        "down_proj": (sizes.intermediate_size, hidden),
        "lm_head": (hidden, sizes.vocab_size),
    }
    for name, (inner, outer) in shapes.items():
        weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16)
        for rows in sizes.rows:
            x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
            num_bytes = BYTES * (inner * outer + rows * (inner + outer))
            run = partial(ops.linear, x, weight, None)
            yield Case(f"{name} rows={rows}", run, num_bytes, flops=2.0 * rows * inner * outer)


def sampling_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Logits read once; masks also copy them, as the contract says."""
    rows, vocab = sizes.decode_seqs, sizes.vocab_size
    logits = torch.randn(rows, vocab, device=device)
    seeds, ones = torch.arange(rows, device=device), torch.ones(rows, device=device)
    drawn = (logits.bfloat16(), ones, seeds, seeds)
    yield _beside_reference("draw_tokens", ops.draw_tokens, drawn, 2 * logits.numel())
    told = (logits.bfloat16(), seeds, 5)
    yield _beside_reference("token_logprobs", ops.token_logprobs, told, 2 * logits.numel())
    filters = {"top_k_S": torch.full_like(seeds, 50), "top_p_S": 0.9 * ones}
    yield _beside_reference("draw_tokens filtered", ops.draw_tokens, drawn, 2 * logits.numel(), **filters)
    masks = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32, device=device)
    num_bytes = 8 * logits.numel() + 4 * masks.numel()
    yield _beside_reference("apply_token_masks", ops.apply_token_masks, (logits, masks, seeds), num_bytes)


def decode_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """One query per sequence: the bytes are those of K and V; then the same with a prefix that all share."""
    for context in sizes.contexts:
        step = make_step([1] * sizes.decode_seqs, [context] * sizes.decode_seqs, device)
        tokens = sizes.decode_seqs * context
        yield _attention_case(f"decode context={context}", sizes, step, kv_tokens=tokens, pairs=tokens)
    context, shared = sizes.prefix_len + 100, sizes.prefix_len // BLOCK_SIZE
    step = make_step([1] * sizes.decode_seqs, [context] * sizes.decode_seqs, device, shared)
    everyone = [(list(range(sizes.decode_seqs)), sizes.prefix_len)]
    grouped = replace(step, shared_prefixes=prefixes_of(everyone, sizes.decode_seqs, device))
    case = _attention_case(
        f"decode shared_prefix={sizes.prefix_len}",
        sizes,
        grouped,
        kv_tokens=sizes.prefix_len + 100 * sizes.decode_seqs,
        pairs=context * sizes.decode_seqs,
    )
    yield replace(case, rival=_attention_case("", sizes, step, kv_tokens=0, pairs=0).run)


def prefill_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Whole prompts, as many as make up the longest; the rival is torch's own attention on contiguous keys."""
    for length in sizes.prompts:
        count = max(sizes.prompts) // length
        step = make_step([length] * count, [length] * count, device)
        pairs = count * length * (length + 1) // 2
        case = _attention_case(f"prefill {count}x{length}", sizes, step, kv_tokens=count * length, pairs=pairs)
        shape = (count, sizes.num_heads, length, sizes.head_dim)
        q, k, v = torch.randn(3, *shape, device=device, dtype=torch.bfloat16)
        k, v = (x[:, : sizes.num_kv_heads].contiguous() for x in (k, v))

        def dense(q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        yield replace(case, rival=dense)


def fp8_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Decoding over an fp8 cache and products with fp8 weights, beside bfloat16; such products may pass its ceiling."""
    for context in sizes.contexts:
        step = make_step([1] * sizes.decode_seqs, [context] * sizes.decode_seqs, device)
        tokens = sizes.decode_seqs * context
        case = _attention_case(f"decode fp8 context={context}", sizes, step, kv_tokens=tokens, pairs=tokens, kv=FP8)
        yield replace(case, rival=_attention_case("", sizes, step, kv_tokens=0, pairs=0).run)
    inner, outer = sizes.hidden_size, 2 * sizes.intermediate_size
    weight = torch.randn(outer, inner, device=device, dtype=torch.bfloat16)
    quantized = ops.quantize_rows(weight)
    for rows in (sizes.decode_seqs, sizes.num_tokens):
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        yield _beside_reference(f"quantize_rows T={rows}", ops.quantize_rows, (x,), (BYTES + 1) * x.numel())
        yield Case(
            f"fp8_linear T={rows}",
            partial(ops.fp8_linear, x, *quantized, None),
            num_bytes=BYTES * rows * (inner + outer) + inner * outer,
            flops=2.0 * rows * inner * outer,
            rival=partial(ops.linear, x, weight, None),
        )


def _attention_case(
    name: str, sizes: Sizes, step: AttentionMetadata, *, kv_tokens: int, pairs: int, kv: torch.dtype = torch.bfloat16
) -> Case:
    device, dim = step.context_lens_S.device, sizes.head_dim
    shape = (int(step.block_tables_SM.max()) + 1, BLOCK_SIZE, sizes.num_kv_heads, dim)
    k_cache = torch.randn(shape, device=device, dtype=torch.bfloat16).to(kv)
    v_cache = torch.randn(shape, device=device, dtype=torch.bfloat16).to(kv)
    q = torch.randn(step.slot_mapping_T.numel(), sizes.num_heads, dim, device=device, dtype=torch.bfloat16)

    def attend() -> torch.Tensor:
        return ops.paged_attention(q, k_cache, v_cache, step, scale=dim**-0.5, sliding_window=None)

    num_bytes = 2 * (kv.itemsize * kv_tokens * sizes.num_kv_heads * dim + BYTES * q.numel())
    return Case(name, attend, num_bytes, flops=4.0 * pairs * sizes.num_heads * dim)


def _beside_reference(
    name: str, op: Callable[..., object], args: tuple[object, ...], num_bytes: float, **options: object
) -> Case:
    reference: Callable[..., object] = op.__wrapped__  # type: ignore[attr-defined]
    return Case(name, lambda: op(*args, **options), num_bytes, rival=lambda: reference(*args, **options))


CASES = {
    "products": product_cases,
    "elementwise": elementwise_cases,
    "sampling": sampling_cases,
    "decode": decode_cases,
    "prefill": prefill_cases,
    "fp8": fp8_cases,
    "encoders": encoder_cases,
    "experts": expert_cases,
    "four_bits": four_bit_cases,
    "latents": latent_cases,
    "states": state_cases,
    "streams": stream_cases,
}


def median_s(run: Callable[[], object], repeats: int = 30) -> float:
    """Median seconds of a call, after compiling."""
    if not torch.cuda.is_available():
        return statistics.median(_seconds(run) for _ in range(3))
    for _ in range(3):
        run()
    flush = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    return statistics.median(_device_seconds(run, flush) for _ in range(repeats))


def _device_seconds(run: Callable[[], object], flush: torch.Tensor) -> float:
    """Between CUDA events, with what the L2 holds thrown out: long enough for the host to launch what follows it."""
    flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def ceilings(device: str) -> tuple[float, float]:
    """This device's copy bandwidth in bytes/s and its bf16 GEMM rate in FLOP/s."""
    num_bytes, width = (2**30, 8192) if device == "cuda" else (2**20, 256)
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, width, width, device=device, dtype=torch.bfloat16)
    return 2 * source.numel() / median_s(lambda: target.copy_(source)), 2 * width**3 / median_s(lambda: a @ b)


def measure(case: Case, bandwidth: float, gemm_rate: float) -> dict[str, object]:
    """A case's line: the least time the ceilings allow over the time it took is its share."""
    seconds = median_s(case.run)
    line: dict[str, object] = {
        "op": case.name,
        "us": round(seconds * 1e6, 2),
        "gb_s": round(case.num_bytes / seconds / 1e9, 1),
        "tflop_s": round(case.flops / seconds / 1e12, 2),
        "share_of_ceiling": round(max(case.num_bytes / bandwidth, case.flops / gemm_rate) / seconds, 3),
    }
    if case.rival is not None:
        rival_s = median_s(case.rival)
        line |= {"rival_us": round(rival_s * 1e6, 2), "rival_over_ours": round(rival_s / seconds, 2)}
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one family of ops")
    parser.add_argument("--head-dim", type=int, default=Sizes.head_dim)
    parser.add_argument("--tokens", type=int, default=Sizes.num_tokens, help="tokens of an elementwise step")
    parser.add_argument("--smoke", action="store_true", help="tiny cases on a CPU")
    args = parser.parse_args()
    if not (args.smoke or torch.cuda.is_available()):
        sys.exit("gpu_ops measures Triton kernels on a CUDA device, and torch sees none on this machine.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = TINY if args.smoke else Sizes(head_dim=args.head_dim, num_tokens=args.tokens)
    bandwidth, gemm_rate = ceilings(device)
    chosen = [CASES[args.only]] if args.only else list(CASES.values())
    facts = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU",
        "versions": {"torch": torch.__version__, "triton": version("triton"), "python": platform.python_version()},
        "copy_gb_s": round(bandwidth / 1e9, 1),
        "gemm_tflop_s": round(gemm_rate / 1e12, 1),
    }
    print(json.dumps(facts), flush=True)
    for cases in chosen:
        for case in cases(sizes, device):
            print(json.dumps(measure(case, bandwidth, gemm_rate)), flush=True)


if __name__ == "__main__":
    main()
