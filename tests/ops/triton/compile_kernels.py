"""Compiles every kernel for a Hopper GPU as it would be launched there, without one, and prints what each needs.

    python -m tests.ops.triton.compile_kernels [--head-dim 128] [--dtype bfloat16] [--quick] [--attention]
    python -m tests.ops.triton.compile_kernels --head-dim 576 --value-dim 512 --groups 16 20 128

The interpreter runs kernels, but proves nothing about the compiler: types of tensor-core products, shared memory,
registers. Here the launchers are called on small CPU tensors and each launch ends after compiling. One JSON line per
kernel: shared memory and stack (spilled registers) in bytes, registers, how many wide matrix instructions, and for how
many of them more than the kernel asks for the assembler waits at once; how many instructions write a register that such
a one may still read; how many copies may be under way at each wait in a loop, for attention the query heads of a key
head, and the rows of a tile where it has such.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from bulkrun import ops
from bulkrun.ops import dispatch
from bulkrun.ops.matmul.four_bit_weight import E2M1, WHOLE_NUMBERS, FourBitWeight, in_bits
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.triton import attention_tile
from bulkrun.ops.triton import packed_attention as packed_attention_kernels
from bulkrun.windows import Chunks
from tests.ops.linear_attention.steps import DECODE, MIXED, NUM_ROWS, make_meta
from tests.ops.prefix_groups import prefixes_of
from tests.ops.triton.attention_cases import make_case
from tests.ops.triton.overwritten_operands import overwritten_operands


class CompilingDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


def call_every_op(head_dim: int, dtype: torch.dtype, *, has_fp8: bool, is_quick: bool) -> None:
    """One call of each op that reaches each of its kernels, in each of their kinds; quick: with none of the four things
    that attention may have or not, and with all of them, and as few kinds of others as there are sizes of tiles."""
    kv_dtypes = (dtype, FP8) if has_fp8 else (dtype,)
    rows, index = torch.zeros(4, 4096, dtype=dtype), torch.zeros(4, dtype=torch.int64)
    ops.rms_norm(rows, rows[0].float(), 1e-6)
    ops.add_rms_norm(rows, rows, rows[0], 1e-6)
    ops.add_layer_norm(rows, rows, rows[0], rows[0], 1e-6)
    ops.silu_mul(rows)
    linear_attention(dtype)
    state_spaces(dtype)
    packed_attention(head_dim, dtype, is_quick=is_quick)
    tables_RM = torch.zeros(4, 8, dtype=torch.int32)
    buffers = ops.StepBuffers.allocate(8, 4, 8, torch.device("cpu"))
    ops.step_inputs(tables_RM, tables_RM, index.repeat(3, 1), buffers, block_size=16)
    ops.gelu_mul(rows)
    ops.xielu(rows, torch.zeros(2))
    ops.cut_gates_(rows, 1.6)
    streams_NTE = rows.unflatten(-1, (4, -1)).transpose(0, 1).contiguous()
    ops.with_rms_of(streams_NTE, streams_NTE[0], 1e-5)
    ops.predict_streams(streams_NTE, rows[:, :4], rows[0, :64].view(16, 4))
    ops.correct_streams(streams_NTE, streams_NTE[0], rows[:, :4], rows[:, :4])
    ops.sum_by_token(rows, index, torch.ones(2, 2))
    ops.gated(rows, ops.ClampedSwiglu(1.702, 7.0))
    qkv_TND, angles = torch.zeros(4, 12, head_dim, dtype=dtype), torch.zeros(4, 1, head_dim, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 3, 16, 2, head_dim, dtype=dtype)
    for weight in (qkv_TND[0, :10].contiguous(), None):
        ops.norm_rotary_store(qkv_TND, weight, 1e-6, angles, angles, k_cache, v_cache, index)
    a_quarter = angles[..., : head_dim // 4].contiguous()  # of each head is turned
    ops.norm_rotary_store(qkv_TND, None, 1e-6, a_quarter, a_quarter, k_cache, v_cache, index)
    codes, scale = torch.zeros(4, 2048, dtype=torch.uint8), torch.zeros(4, 32)
    for scale_dtype, zero in ((torch.bfloat16, None), (torch.float32, torch.zeros(4, 32, dtype=torch.uint8))):
        ops.four_bit_linear(rows, FourBitWeight(codes, scale.to(scale_dtype), zero, torch.zeros(16)), None)
    four_bit_products(dtype, is_quick=is_quick)
    if has_fp8:
        ops.norm_rotary_store(qkv_TND, None, 1e-6, angles, angles, k_cache.to(FP8), v_cache.to(FP8), index)
        ops.quantize_rows(rows)
        fp8_experts(dtype)
    for num_outputs in (4096, 14336):
        ops.invariant_linear(rows, [torch.zeros(num_outputs, 4096, dtype=dtype)], None, None)
    logits_SV = torch.zeros(4, 128_256)
    ops.draw_tokens(logits_SV.to(dtype), torch.ones(4), index, index)
    for vocab_size in (262_144,) if is_quick else (32_000, 128_256, 151_936, 262_144):
        ops.draw_tokens(torch.zeros(4, vocab_size, dtype=dtype), torch.ones(4), index, index, top_k_S=index)
    if not is_quick:
        ops.draw_tokens(logits_SV, torch.ones(4), index, index, top_k_S=index)
    ops.token_logprobs(logits_SV.to(dtype), index, 5)
    lens, ones = index + 3, torch.ones(4)
    ops.apply_penalties(
        logits_SV, index, torch.zeros(4, 300, dtype=torch.int32), lens, lens,
        presence_A=ones, frequency_A=ones, repetition_A=ones,
    )  # fmt: skip
    ops.apply_token_masks(logits_SV, torch.zeros(4, 4008, dtype=torch.int32), index)
    for query_lens, contexts in (([1, 1, 60], [600, 700, 60]), ([1, 1], [90, 80])):
        case = make_case(query_lens, contexts, (8, 2, head_dim), block_size=16, dtype=dtype, device="cpu")
        kinds = product(
            ((None, None), (128, 30.0)),
            kv_dtypes,
            (None, torch.zeros(8)),
            (ops.paged_attention, ops.invariant_attention),
        )
        for number, ((window, soft_cap), kv_dtype, sinks_H, attention) in enumerate(kinds):
            if is_quick and number.bit_count() not in (0, 4):
                continue
            k_cache, v_cache = case.k_cache.to(kv_dtype), case.v_cache.to(kv_dtype)
            attention(
                case.q_THD, k_cache, v_cache, case.meta,
                scale=0.1, sliding_window=window, soft_cap=soft_cap, sinks_H=sinks_H,
            )  # fmt: skip
        for attention in (ops.paged_attention, ops.invariant_attention):
            attention(case.q_THD, case.k_cache, case.v_cache, case.meta, scale=0.1, sliding_window=Chunks(70))
    for num_heads in (8, 10):  # five query heads of a key head leave rows of a tile over
        heads = (num_heads, 2, head_dim)
        case = make_case([1, 1], [600, 700], heads, block_size=16, dtype=dtype, device="cpu", shared_blocks=33)
        chunk = make_case([60], [60], heads, block_size=16, dtype=dtype, device="cpu")
        meta = replace(case.meta, shared_prefixes=prefixes_of([([0, 1], 512)], 2, "cpu"))
        for kv_dtype in kv_dtypes[-1:] if is_quick and num_heads == 10 else kv_dtypes:
            k_cache, v_cache = case.k_cache.to(kv_dtype), case.v_cache.to(kv_dtype)
            ops.paged_attention(case.q_THD, k_cache, v_cache, meta, scale=0.1, sliding_window=None)
            ops.paged_attention(chunk.q_THD, k_cache, v_cache, chunk.meta, scale=0.1, sliding_window=None)


def call_paged_attention(heads: tuple[int, int, int], value_dim: int, dtype: torch.dtype, *, has_fp8: bool) -> None:
    """Alone, for heads that are wider than any model has them that other ops are for, and for values within keys."""
    for query_lens, prefixes in (([1, 1, 60], None), ([1, 1], prefixes_of([([0, 1], 512)], 2, "cpu"))):
        contexts = [600, 700, 60][: len(query_lens)]
        case = make_case(query_lens, contexts, heads, block_size=16, dtype=dtype, device="cpu", shared_blocks=33)
        meta = replace(case.meta, shared_prefixes=prefixes)
        for kv_dtype in (dtype, FP8) if has_fp8 else (dtype,):
            k_cache, v_cache = case.k_cache.to(kv_dtype), case.v_cache.to(kv_dtype)
            if value_dim < heads[2]:
                v_cache = k_cache[..., -value_dim:]
            ops.paged_attention(case.q_THD, k_cache, v_cache, meta, scale=0.1, sliding_window=None)


def linear_attention(dtype: torch.dtype) -> None:
    """A step of decoding, and one with prompts, of Qwen3.5-9B's heads."""
    qkv_TC, ba_TG = torch.zeros(24, 8192, dtype=dtype), torch.zeros(24, 64, dtype=dtype)
    state, of_heads = torch.zeros(NUM_ROWS, 32, 128, 128), torch.zeros(32)
    of_channels, ba_of_channels_TG = torch.zeros(32 * 128), torch.zeros(24, 32 + 32 * 128, dtype=dtype)
    for parts in (DECODE, MIXED):
        meta = make_meta(parts)
        for bias_C, silu in ((None, True), (qkv_TC[0], True), (None, False)):
            conv_state = torch.zeros(NUM_ROWS, 3, 8192, dtype=dtype)
            ops.causal_conv(qkv_TC, qkv_TC[:4], bias_C, conv_state, meta, silu=silu)
        ops.gated_delta_rule(qkv_TC, ba_TG, of_heads, of_heads, state, meta)
        kimi_TC = torch.zeros(24, 3 * 32 * 128, dtype=dtype)
        ops.gated_delta_rule(kimi_TC, ba_of_channels_TG, of_heads, of_channels, state, meta)
    heads_THV = qkv_TC[:, :4096].contiguous().unflatten(1, (32, 128))
    for silu in (True, False):
        ops.gated_rms_norm(heads_THV, heads_THV, qkv_TC[0, :128].contiguous(), 1e-6, silu=silu)


def state_spaces(dtype: torch.dtype) -> None:
    """A step of decoding, and one with prompts, of Mamba's channels and Mamba 2's heads, and the norms behind them."""
    of_heads = torch.zeros(48)
    for size, head_dim in ((16, 64), (64, 64), (128, 64), (256, 128)):
        xbc_TC = torch.zeros(24, 48 * head_dim + 2 * size, dtype=dtype)
        state = torch.zeros(NUM_ROWS, 48, size, head_dim)
        for parts in (DECODE, MIXED):
            ops.state_space(xbc_TC, xbc_TC[:, :48], of_heads, of_heads, of_heads, state, make_meta(parts))
    for num_channels, size in ((5120, 16), (8192, 16), (1536, 128)):
        of_channels = torch.zeros(num_channels)
        x_TC, b_TN = torch.zeros(24, num_channels, dtype=dtype), torch.zeros(24, size, dtype=dtype)
        rate_NC, state = torch.zeros(size, num_channels), torch.zeros(NUM_ROWS, num_channels // 64, size, 64)
        for parts in (DECODE, MIXED):
            ops.selective_scan(x_TC, x_TC, b_TN, b_TN, x_TC, rate_NC, of_channels, of_channels, state, make_meta(parts))
    for num_groups in (1, 8):
        groups_TGE = torch.zeros(24, num_groups, 8192 // num_groups, dtype=dtype)
        ops.gated_rms_norm(groups_TGE, groups_TGE, groups_TGE[0], 1e-6, norm_before_gate=False)


def packed_attention(head_dim: int, dtype: torch.dtype, *, is_quick: bool) -> None:
    """Of encoders, over long texts and short ones: plain, biased, with windows, and with heads that share keys."""
    for num_heads, window, has_bias in ((2, None, False), (2, None, head_dim <= 128), (6, 257, False)):
        bias = torch.zeros(num_heads, 1023) if has_bias else None
        for lens in ([300, 200],) if is_quick else ([300, 200], [20] * 10):
            states = torch.zeros(sum(lens), num_heads + 4, head_dim, dtype=dtype).split([num_heads, 2, 2], dim=1)
            texts = ops.TextLens.of(lens)
            ops.packed_attention(*states, texts, scale=0.1, sliding_window=window, distance_bias=bias)


def fp8_experts(dtype: torch.dtype) -> None:
    """In each kind of tile; of the width of gpt-oss's, which fills none."""
    width, shapes = 2880, ((2, 5760, 2880), (2, 2880, 2880))
    both = [ops.Fp8Weight(torch.zeros(shape, dtype=FP8), torch.zeros(*shape[:2], 1)) for shape in shapes]
    biases = torch.zeros(2, 2 * width, dtype=dtype), torch.zeros(2, width, dtype=dtype)
    for num_tokens in (3, 100, 400):
        routed = torch.zeros(num_tokens, 1), torch.zeros(num_tokens, 1, dtype=torch.int64)
        ops.fused_experts(torch.zeros(num_tokens, width, dtype=dtype), *both, *routed, biases)


def four_bit_products(dtype: torch.dtype, *, is_quick: bool) -> None:
    """In each kind of tile: AWQ's at the size of a 70B's projection, MXFP4 at the width of gpt-oss's experts."""
    whole = in_bits(four_bit_weight((256, 8192), 128, WHOLE_NUMBERS))
    for num_rows in (4, 20, 50, 100, 1025):  # of the last the numbers are unpacked first
        ops.four_bit_linear(torch.zeros(num_rows, 8192, dtype=dtype), whole, None)
    both = [in_bits(four_bit_weight((2, *shape), 32, E2M1)) for shape in ((5760, 2880), (2880, 2880))]
    biases = torch.zeros(2, 5760, dtype=dtype), torch.zeros(2, 2880, dtype=dtype)
    for num_tokens in (3, 400) if is_quick else (3, 30, 50, 400):
        routed = torch.zeros(num_tokens, 1), torch.zeros(num_tokens, 1, dtype=torch.int64)
        ops.fused_experts(torch.zeros(num_tokens, 2880, dtype=dtype), *both, *routed, biases)


def four_bit_weight(shape: tuple[int, ...], group_size: int, codebook: tuple[float, ...]) -> FourBitWeight:
    """Of zeros, and scales of one."""
    *outputs, size = shape
    scale_dtype = torch.bfloat16 if codebook == E2M1 else torch.float32
    scale = torch.ones(*outputs, size // group_size, dtype=scale_dtype)
    return FourBitWeight(torch.zeros(*outputs, size // 2, dtype=torch.uint8), scale, None, torch.tensor(codebook))


def needs(kernel: Any) -> dict[str, object]:
    """What a compiled kernel takes of a multiprocessor."""
    if not kernel.asm["cubin"]:
        return {"kernel": kernel.metadata.name, "shared": kernel.metadata.shared}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    ptx = kernel.asm["ptx"]
    instructions = ["--dump-sass"] if "wgmma" in ptx else []  # of others nothing is asked that they would tell
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        command = [str(tool), "--dump-resource-usage", *instructions, file.name]
        dump = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", dump)[0]
    return {
        "kernel": kernel.metadata.name,
        "group": _constant(kernel, "GROUP"),
        "block_m": _constant(kernel, "BLOCK_M"),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "registers": int(registers),
        "stack": int(stack),
        "wide_loads": len(re.findall(r"ld\.global\S*\.v[24]\.", ptx)),
        "wgmma": ptx.count("wgmma.mma_async"),
        "serial": len(re.findall(r"WARPGROUP\.DEPBAR\S* gsb0, 0x0", dump))
        - ptx.count("wgmma.wait_group.sync.aligned 0;"),
        "overwritten": len(overwritten_operands(dump)),
        "waits": _waits_in_loops(kernel.asm["ttgir"]),
    }


def _waits_in_loops(ttgir: str) -> list[int]:
    """Of each wait for copies to shared memory in an innermost loop, how many may still be under way after it."""
    waits: dict[int, list[int]] = {}  # by the line that opens the loop
    loops: list[tuple[int, int]] = []  # those that are open: their line, and how far it is indented
    for number, line in enumerate(ttgir.splitlines()):
        indent = len(line) - len(line.lstrip())
        while loops and indent <= loops[-1][1]:
            loops.pop()
        if " scf.for " in line:
            for outer, _ in loops:
                waits.pop(outer, None)  # what is waited for around a loop is not for its tiles
            loops.append((number, indent))
            waits[number] = []
        elif loops and (found := re.search(r"ttg\.async_wait .*num = (\d+)", line)):
            waits.get(loops[-1][0], []).append(int(found[1]))
    return [num for of_loop in waits.values() for num in of_loop]


def _constant(kernel: Any, name: str) -> object:
    """What a kernel was compiled for; None where it knows no such thing."""
    names = kernel.src.fn.arg_names
    return kernel.src.constants.get((names.index(name),)) if name in names else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, help="of values within keys, as latent attention has them")
    parser.add_argument("--groups", type=int, nargs="+", default=[4], help="query heads of a key head, where wide")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--quick", action="store_true", help="an eighth of the kinds of attention; of --attention those without fp8"
    )
    parser.add_argument("--attention", action="store_true", help="that alone, over a cache and packed")
    parser.add_argument(
        "--shared", action="store_true", help="tell of shared memory alone, and leave out the assembler"
    )
    parser.add_argument("--capability", type=int, default=90, help="80: A100, 86: A10, 89: L4, 90: H100, 100: B200")
    args = parser.parse_args()
    driver.set_active(CompilingDriver(args.capability))
    if args.shared:
        CUDABackend.make_cubin = lambda *_: b""
    dispatch.uses_triton = lambda tensor: True
    has_large = args.capability in (80, 90, 100)
    for module in (attention_tile, packed_attention_kernels):
        module.has_large_shared_memory = lambda device: has_large  # type: ignore[assignment]
    compiled: dict[int, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *values: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *values, grid=grid, warmup=True, **options)
        compiled.setdefault(id(kernel), kernel)
        return kernel

    JITFunction.run = compile_only
    dtype, has_fp8 = getattr(torch, args.dtype), args.capability >= 89
    if args.attention and args.head_dim <= 256:
        packed_attention(args.head_dim, dtype, is_quick=args.quick)
    if args.attention or args.head_dim > 256 or args.value_dim is not None:
        num_kv_heads, value_dim = (2, args.head_dim) if args.value_dim is None else (1, args.value_dim)
        for group in args.groups:
            heads = (num_kv_heads * group, num_kv_heads, args.head_dim)
            call_paged_attention(heads, value_dim, dtype, has_fp8=has_fp8 and not args.quick)
    else:
        call_every_op(args.head_dim, dtype, has_fp8=has_fp8, is_quick=args.quick)
    for kernel in compiled.values():
        print(json.dumps(needs(kernel)))


if __name__ == "__main__":
    main()
