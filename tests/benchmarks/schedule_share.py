"""What scheduling costs on a GPU that is not there: the real scheduler, and arithmetic in place of the device.

    python -m tests.benchmarks.schedule_share [--shape llama-3.1-8b] [--lengths 1024/256 512/512] [--num-requests 3000]
        [--max-num-seqs 1024] [--max-num-batched-tokens 8192] [--pool-gb 105.9] [--cost '{"decode_read": 1}']

Every step's tokens, contexts and seats are counted; `Cost` turns them into seconds by what an H200's ops did in a
traced run of 1024/256 (LOG.md, 2026-11-26). Found there and simulated since: 40.5 and 40 s, 1024/1024 30.3 and 31 s,
2048/128 42.3 and 43 s. So other workloads are guesses to a few percent; what the numbers tell besides is what a policy
changes (other budgets, seats, pools), and how the loss divides: `loss` is what each cost takes of the time, and
`share_without_losses` what is left to the schedule itself, small steps that have to read all weights. One JSON line per
workload. `chunk_pairs` and `decode_keys` are (query, key) pairs of one layer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

from bulkrun.engine.scheduling.batching import ContinuousBatching
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.finishing import append_token
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.launch.bench.ceilings import FLOPS_PER_PAIR, FLOPS_PER_WEIGHT, DeviceRates, ModelCost, attended, ceilings
from bulkrun.launch.bench.shapes import SHAPE_NAMES, write_shape
from bulkrun.launch.bench.workload import Lengths, Work, random_work
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.request import Request, SamplingParams
from bulkrun.settings import DEFAULT_BLOCK_SIZE, DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS
from tests.benchmarks.machine import commit

H200 = DeviceRates(gemm_flop_s=805e12, read_bytes_s=4.37e12)  # the products' for a moment: see LOG.md
KV_ITEMSIZE = WEIGHT_BYTES = 2  # bf16
LENGTHS = ("1024/512", "1024/256", "128/1024", "512/512", "2048/128")


@dataclass(frozen=True)
class Cost:
    """Shares of the device's rates, and seconds; the defaults of `NO_LOSS` are no loss at all."""

    gemm: float = 0.86
    half_rate_rows: float = 50.0  # products of so many rows reach half of that
    decode_read: float = 0.9
    prefill: float = 0.27  # of the GEMM rate
    elementwise_bytes: float = 174e3  # per token and layer: two norms, rotary and KV store, activation
    elementwise_read: float = 0.95
    step_s: float = 0.2e-3


NO_LOSS = Cost(1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0)


class Step(NamedTuple):
    """What one step computes, and who was there."""

    tokens: int
    samples: int
    decode_keys: int
    chunk_pairs: int
    running: int
    waiting: int

    def seconds(self, model: ModelCost, cost: Cost) -> float:
        width, kv_bytes = (sum(getattr(one, name) for one in model.attention) for name in ("width", "kv_bytes"))
        rate = H200.gemm_flop_s * cost.gemm
        weights = model.num_body_weights * self.tokens + model.num_lm_head_weights * self.samples
        products = FLOPS_PER_WEIGHT * weights / rate * (1 + cost.half_rate_rows / self.tokens)
        read_weights = WEIGHT_BYTES * (model.num_body_weights + model.num_lm_head_weights) / H200.read_bytes_s
        chunks = FLOPS_PER_PAIR * width * self.chunk_pairs / (H200.gemm_flop_s * cost.prefill)
        decode = kv_bytes * self.decode_keys / (H200.read_bytes_s * cost.decode_read)
        elementwise = cost.elementwise_bytes * self.tokens / (H200.read_bytes_s * cost.elementwise_read)
        of_layers = chunks + decode + len(model.attention) * elementwise
        return max(products, read_weights) + of_layers + cost.step_s


def steps_of(work: Seq[Work], *, num_seqs: int, num_tokens: int, num_blocks: int) -> list[Step]:
    """The steps of an engine with asynchronous scheduling, which learns a step's tokens once the next is under way."""
    blocks = BlockManager(num_blocks, DEFAULT_BLOCK_SIZE)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        enable_prefix_caching=False,
        policy=ContinuousBatching(num_seqs),
    )
    for arrival, (prompt, num_output) in enumerate(work):
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        request = Request(str(arrival), prompt, sampling)
        scheduler.add(Sequence(request, arrival=arrival, max_model_len=len(prompt) + num_output))
    steps: list[Step] = []
    under_way: list[Sequence] = []
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        sampling_seqs = list(batch.sampling_seqs())
        if batch.seqs:
            steps.append(_count(batch, scheduler))
        for seq in sampling_seqs:
            seq.num_pending += 1
        _land(scheduler, under_way)
        under_way = sampling_seqs
    return steps


def _count(batch: ScheduledBatch, scheduler: Scheduler) -> Step:
    chunks = zip(batch.starts, batch.num_scheduled_tokens, strict=True)
    pairs = [attended(start + count, None) - attended(start, None) for start, count in chunks]
    num_decode = batch.num_decode_seqs
    decode_keys, chunk_pairs = sum(pairs[:num_decode]), sum(pairs[num_decode:])
    num_samples = len(batch.sampling_indices())
    return Step(batch.num_tokens, num_samples, decode_keys, chunk_pairs, len(scheduler.running), scheduler.num_waiting)


def _land(scheduler: Scheduler, seqs: list[Sequence]) -> None:
    for seq in seqs:
        seq.num_pending -= 1
    scheduler.finish([seq for seq in seqs if append_token(seq, 0)])


def report(model: ModelCost, work: Seq[Work], steps: Seq[Step], cost: Cost) -> dict[str, object]:
    """Shares of SERIAL and of the time, of the whole run."""
    serial_s = ceilings(model, work, H200).serial_s
    seconds = [step.seconds(model, cost) for step in steps]
    wall_s = sum(seconds)
    full = next(i for i, step in enumerate(steps) if step.running >= 0.98 * max(step.running for step in steps))
    empty = max((i + 1 for i, step in enumerate(steps) if step.waiting), default=0)
    return {
        "steps": len(steps),
        "wall_s": round(wall_s, 2),
        "share_of_serial": round(serial_s / wall_s, 4),
        "share_without_losses": round(serial_s / sum(step.seconds(model, NO_LOSS) for step in steps), 4),
        "most_running": max(step.running for step in steps),
        "time_filling": round(sum(seconds[:full]) / wall_s, 4),
        "time_draining": round(sum(seconds[max(full, empty) :]) / wall_s, 4),
        "loss": {
            field.name: round(1 - sum(step.seconds(model, _without(cost, field.name)) for step in steps) / wall_s, 4)
            for field in fields(cost)
        },
    }


def _without(cost: Cost, name: str) -> Cost:
    return replace(cost, **{name: getattr(NO_LOSS, name)})


def cost_of_shape(shape: str, kv_itemsize: int = KV_ITEMSIZE) -> ModelCost:
    """What a token costs a model of this shape with a KV cache of so many bytes a number."""
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig.from_dir(write_shape(shape, Path(folder), dtype="bfloat16", max_model_len=8192))
    return ModelCost.of(config, kv_itemsize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPE_NAMES, default="llama-3.1-8b")
    parser.add_argument("--lengths", nargs="+", default=LENGTHS, help="input/output, each a number or a range")
    parser.add_argument("--num-requests", type=int, default=3000)
    parser.add_argument("--max-num-seqs", type=int, default=DEFAULT_MAX_NUM_SEQS["cuda"])
    parser.add_argument("--max-num-batched-tokens", type=int, default=DEFAULT_MAX_NUM_BATCHED_TOKENS["cuda"])
    parser.add_argument(
        "--pool-gb", type=float, default=105.9, help="for keys and values (default: 0.9 * 141 - 16 - 5)"
    )
    parser.add_argument("--cost", type=json.loads, default={}, help="JSON: assumptions other than the defaults")
    args = parser.parse_args()
    model, cost = cost_of_shape(args.shape), Cost(**args.cost)
    num_blocks = int(args.pool_gb * 1e9 / (sum(layer.kv_bytes for layer in model.attention) * DEFAULT_BLOCK_SIZE))
    sizes = {"num_seqs": args.max_num_seqs, "num_tokens": args.max_num_batched_tokens, "num_blocks": num_blocks}
    for lengths in args.lengths:
        input_len, output_len = (Lengths.parse(text, "--lengths") for text in lengths.split("/"))
        work = random_work(args.num_requests, input_len, output_len, shared_prefix=0, vocab_size=1000)
        facts = {"benchmark": "schedule_share", "shape": args.shape, "lengths": lengths, **sizes}
        found = report(model, work, steps_of(work, **sizes), cost)
        print(json.dumps(facts | found | {"assumed": asdict(cost), "commit": commit()}), flush=True)


if __name__ == "__main__":
    main()
