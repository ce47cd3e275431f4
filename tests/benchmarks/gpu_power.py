"""What is left of a GPU's rates when all of it is at work: Llama-3.1-8B's products and decode attention, in bf16.

    python -m tests.benchmarks.gpu_power

Prints JSON lines. `sustained`: TFLOP/s of one product, 60 ms after 60 ms. `between`: microseconds of attention and of a
product in turns. `beside`: microseconds of a layer whose attention over sequences that decode runs on a second stream
beside the products of a prompt, for several shares of the multiprocessors that cuBLASLt leaves free (torch's
experimental carve-out), and one after the other. Beside it, what the power cap does is seen in
`nvidia-smi --query-gpu=clocks.sm,power.draw.instant,clocks_event_reasons.active --format=csv -lms 200`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F

from bulkrun import ops
from bulkrun.ops import AttentionMetadata

HEADS, KV_HEADS, HEAD_DIM, WIDTH, INNER = 32, 8, 128, 4096, 14336
NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE = 4, 55_448, 16  # enough layers that no cache holds one until its next turn
NUM_DECODE, CONTEXT, CHUNK = 750, (1024, 1280), 1024
CARVED = (None, 8, 16, 24, 32, 48, 66)


class Layer(NamedTuple):
    """Weights [O, I], and a KV cache [N, B, K, D]."""

    qkv: torch.Tensor
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor

    @classmethod
    def random(cls) -> Layer:
        shapes = ((6144, WIDTH), (WIDTH, WIDTH), (2 * INNER, WIDTH), (WIDTH, INNER))
        cache = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        return cls(*(randn(*shape) * 0.02 for shape in shapes), randn(*cache), randn(*cache))

    def queries(self, x_TE: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TE, self.qkv).unflatten(-1, (-1, HEAD_DIM))[:, :HEADS]

    def attend(self, q_THD: torch.Tensor, meta: AttentionMetadata) -> torch.Tensor:
        return ops.paged_attention(q_THD, self.k_cache, self.v_cache, meta, scale=0.09, sliding_window=None)

    def rest(self, out_THD: torch.Tensor) -> torch.Tensor:
        return F.linear(ops.silu_mul(F.linear(F.linear(out_THD.flatten(1), self.o), self.gate_up)), self.down)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def metadata(num_decode: int, chunks: list[int]) -> AttentionMetadata:
    """Sequences that decode, and prompts of so many tokens; their blocks lie anywhere."""
    contexts = [*torch.randint(*CONTEXT, (num_decode,)).tolist(), *chunks]
    queries = [1] * num_decode + chunks
    tables = torch.randint(1, NUM_BLOCKS, (len(contexts), -(-max(contexts) // BLOCK_SIZE)), dtype=torch.int32)
    return AttentionMetadata(
        slot_mapping_T=torch.arange(sum(queries), device="cuda"),
        block_tables_SM=tables.cuda(),
        context_lens_S=torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        cu_seqlens_q=torch.tensor([0, *queries], device="cuda").cumsum(0).int(),
        num_decode_seqs=num_decode,
        max_query_len=max(queries),
        max_context_len=max(contexts),
        max_decode_keys=sum(contexts[:num_decode]),
    )


def microseconds(run: Callable[[], object], calls: int) -> float:
    """Of one of so many calls in a row, after two."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run(), run()
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end) / calls


def sustained(layers: list[Layer]) -> None:
    """The widest product of 7,168 tokens."""
    x_TE, flops = randn(7168, WIDTH), 2 * 7168 * layers[0].gate_up.numel()
    times = [microseconds(partial(F.linear, x_TE, layer.gate_up), 30) for _ in range(10) for layer in layers]
    say("sustained", tflop_s=[round(flops / us / 1e6) for us in times])


def between(layers: list[Layer]) -> None:
    """Some seconds in turns; the last two thirds count."""
    x_TE, q_THD, meta = randn(3824, WIDTH), randn(NUM_DECODE, HEADS, HEAD_DIM), metadata(NUM_DECODE, [])
    spans = []
    for _, layer in zip(range(1200), (layer for _ in count() for layer in layers), strict=False):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        marks[0].record()
        layer.attend(q_THD, meta)
        marks[1].record()
        F.linear(x_TE, layer.gate_up)
        marks[2].record()
        spans.append(marks)
    torch.cuda.synchronize()
    late = spans[len(spans) // 3 :]
    attention, product = (sum(m[i].elapsed_time(m[i + 1]) for m in late) / len(late) * 1e3 for i in (0, 1))
    say("between", attention_us=round(attention), product_us=round(product))


def beside(layers: list[Layer]) -> None:
    """Prompts of 3 and 1.5 thousand tokens; priorities put products first where both wait for a multiprocessor."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    products, attention = torch.cuda.Stream(priority=-5), torch.cuda.Stream(priority=0)
    for chunks in ([CHUNK] * 3, [CHUNK, CHUNK // 2]):
        whole, x_TE = metadata(NUM_DECODE, chunks), randn(NUM_DECODE + sum(chunks), WIDTH)
        lanes = (x_TE[:NUM_DECODE], x_TE[NUM_DECODE:]), (metadata(NUM_DECODE, []), metadata(0, chunks))
        with torch.cuda.stream(products):
            told = {"one after the other": microseconds(partial(in_turn, layers, x_TE, whole), 10)}
            for carved in CARVED:
                torch._C._set_sm_carveout_experimental(carved)
                told[f"{carved or 0} left free"] = microseconds(partial(in_lanes, layers, *lanes, attention), 10)
            torch._C._set_sm_carveout_experimental(None)
        say("beside", prompts=sum(chunks), us_per_layer={name: round(us / NUM_LAYERS) for name, us in told.items()})


def in_turn(layers: list[Layer], x_TE: torch.Tensor, meta: AttentionMetadata) -> None:
    for layer in layers:
        x_TE = layer.rest(layer.attend(layer.queries(x_TE), meta))


def in_lanes(
    layers: list[Layer],
    x: tuple[torch.Tensor, torch.Tensor],
    metas: tuple[AttentionMetadata, AttentionMetadata],
    attention: torch.cuda.Stream,
) -> None:
    """What decodes and the prompts, layer by layer: while the first attend the others are multiplied."""
    kept: list[torch.Tensor] = []  # until both streams are done with it
    for _ in zip_longest(decode_lane(layers, x[0], metas[0], attention, kept), prompt_lane(layers, x[1], metas[1])):
        pass


def decode_lane(
    layers: list[Layer], x_TE: torch.Tensor, meta: AttentionMetadata, side: torch.cuda.Stream, kept: list[torch.Tensor]
) -> Iterator[None]:
    for layer in layers:
        q_THD, here = layer.queries(x_TE), torch.cuda.current_stream()
        side.wait_event(here.record_event())
        with torch.cuda.stream(side):
            out_THD = layer.attend(q_THD, meta)
            ended = side.record_event()
        yield
        here.wait_event(ended)
        x_TE = layer.rest(out_THD)
        kept += [q_THD, out_THD]


def prompt_lane(layers: list[Layer], x_TE: torch.Tensor, meta: AttentionMetadata) -> Iterator[None]:
    for layer in layers:
        x_TE = layer.rest(layer.attend(layer.queries(x_TE), meta))
        yield


def say(what: str, **facts: object) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


@torch.inference_mode()
def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("gpu_power measures a CUDA device, and torch sees none on this machine.")
    layers = [Layer.random() for _ in range(NUM_LAYERS)]
    for measure in (sustained, between, beside):
        measure(layers)


if __name__ == "__main__":
    main()
