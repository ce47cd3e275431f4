"""What is measured, and what was predicted before it was, or by what was found the last time (`measured/`) and the
simulator that has its rates. Data, and the arithmetic of fitting it into the time.

Ceilings (SERIAL, NanoFlow-optimal) are those of one H200 at 790 TFLOP/s and 4.3 TB/s in bf16, total tokens/s; the runs
measure their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

LLAMA, QWEN, MIXTURE = "llama-3.1-8b", "qwen3-0.6b", "gpt-oss-20b"
HYBRID, STATE_SPACES, SHARED_KEYS = "qwen3.5-9b", "nemotron-nano-9b-v2", "gemma-4-e4b"
LATENTS, CHANNELS, STATES_ALONE = "glm-4.7-flash", "kimi-linear-48b-a3b", "falcon-mamba-7b"
STREAMS = "gemma-3n-e2b"
ASKED_REQUESTS = 3000  # by the issue, for its targets
_LOAD_S = {"bulkrun": 20.0, "vllm": 150.0}  # guesses: a process, its engine and the first one's kernels,
_AROUND_S, TRACE_S = 7.0, 45.0  # what a run needs beside its own time, and filling the engine again for a trace
_LONGEST = {"load": 2.5, "run": 4.0}  # times as long as guessed: what takes longer hangs
_SHARE = 0.9  # of the time left: what takes longer than guessed must not be killed


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a figure of the result should come to: the issue's `target`, and what was `expected` before measuring.

    `figure`: a key of the result, dotted. `over`: another item, whose figure this one's is divided by.
    """

    figure: str
    expected: float
    target: float | None = None
    over: str | None = None
    at_most: bool = False


@dataclass(frozen=True, slots=True)
class Item:
    """One workload on one engine. `total_tok_s`: the guess by which requests are fitted into the time.

    `least`: with fewer requests than that it is not measured; 0: it takes all of them.
    """

    name: str
    shape: str
    input_len: str
    output_len: str
    total_tok_s: float
    predictions: tuple[Prediction, ...] = ()
    num_requests: int = ASKED_REQUESTS
    least: int = 0
    shared_prefix: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    roofline: bool = True  # with the shares of the ceilings
    trace: bool = False  # and op by op
    engine: str = "bulkrun"

    @property
    def seconds(self) -> float:
        """The guess for its run."""
        mean = sum(_mean(text) for text in (self.input_len, self.output_len)) + self.shared_prefix
        return self.num_requests * mean / self.total_tok_s


def small() -> list[Item]:
    """The one of the issue's targets that a small model decides, as it is asked."""
    return [_qwen("qwen3-0.6b, 256 requests", (Prediction("output_tok_s", 25_800, 10_009),), roofline=True)]


def targets() -> list[Item]:
    """The others, sized so that one lease of fifteen minutes decides each kind: first what has all kinds, then more of
    the same kind, then with the 3,000 requests that the issue asks for, for whoever is lent more.

    Each against SERIAL has more requests than the pool has room for, which by simulation gives at most 1.5 points of it
    less than 3,000. The fp8 pair has fewer: its gain with 300 is 1.35 there where that with 3,000 is 1.40. What is
    divided by another has as many, uncut: speed depends on how many run at a time.
    """
    long, shared, alone = "1024/1024", "shared 1000, 100/100", "shared 1000, 100/100, no prefix work"
    twice = Prediction("total_tok_s", 4.7, 2.0, over=alone)
    smaller_kv = Prediction("total_tok_s", 1.22, 1.20, over=long)
    return [
        _against_serial(1024, 256, 1000, serial=39_397, expected=0.79, trace=True),
        _shared(shared, 180_000, 600, (twice,)),
        _nanoflow(700),
        _shared(alone, 38_600, 600, (), enable_prefix_caching=False),
        Item(
            "1024/1024, fp8 KV", LLAMA, "1024", "1024", 0.70 * 32_553, (smaller_kv,), 300,
            settings={"kv_cache_dtype": "fp8"},
        ),
        Item(long, LLAMA, "1024", "1024", 0.86 * 23_572, (Prediction("share_of_serial", 0.83),), 300),
        _against_serial(128, 1024, 1000, serial=27_342, expected=0.83),
        _against_serial(512, 512, 1000, serial=32_917, expected=0.82),
        _against_serial(1024, 512, 1000, serial=31_618, expected=0.82),
        _against_serial(1024, 256, ASKED_REQUESTS, serial=39_397, expected=0.79),
        _against_serial(512, 512, ASKED_REQUESTS, serial=32_917, expected=0.82),
        _nanoflow(ASKED_REQUESTS),
        _against_serial(1024, 512, ASKED_REQUESTS, serial=31_618, expected=0.82),
        _against_serial(128, 1024, ASKED_REQUESTS, serial=27_342, expected=0.83),
    ]  # fmt: skip


def ablations() -> list[Item]:
    """What each part of the engine brings, against the same engine with it; and last, op by op, models whose layers
    have states or share keys, and mixtures of experts.

    Of the hybrid prompts' delta rule is on no tensor core: a tenth of a step, by its instructions. Reading and writing
    states, a quarter of SERIAL, goes at 3 TB/s, if it does as other kernels of that kind. Falcon Mamba's prompts go
    token by token besides, an eighth of a step.
    Of Gemma 4's layers 18 of 42 make no keys, but only steps too large for a graph leave prompts out there; what layers
    are told of tokens anew is read and written many times. Gemma 3n has four residual streams besides, each read and
    written five times a layer where others have one.
    The mixtures' ceilings count no reading of weights, and a step of 256 tokens reads all experts: they are far from
    them, and half of that is what fp8 saves. GLM-4.7-Flash's prompts attend to latents, in the rows of which its tiles
    multiply twice as much as in keys and values of its heads: a sixth of its time, if they reach 200 TFLOP/s.
    """
    base, mixture = "0.6b, all on", "gpt-oss-20b, 1024/256"
    return [
        _qwen(base, ()),
        _qwen("0.6b, enforce_eager", (Prediction("output_tok_s", 0.45, over=base),), enforce_eager=True),
        _qwen("0.6b, async_scheduling off", (Prediction("output_tok_s", 0.85, over=base),), async_scheduling=False),
        _qwen("0.6b, deterministic", (Prediction("output_tok_s", 0.80, over=base),), deterministic=True),
        _small("8b, all on", ()),
        _small("8b, deterministic", (Prediction("total_tok_s", 0.75, over="8b, all on"),), deterministic=True),
        _small("8b, fp8 weights", (Prediction("total_tok_s", 1.25, over="8b, all on"),), quantization="fp8"),
        Item(
            "qwen3.5-9b, 1024/256", HYBRID, "1024", "256", 25_000, (Prediction("share_of_serial", 0.62),), 400,
            least=100, trace=True,
        ),
        Item(
            "nemotron-nano-9b-v2, 1024/256", STATE_SPACES, "1024", "256", 20_000,
            (Prediction("share_of_serial", 0.58),), 300, least=100, trace=True,
        ),
        Item(
            "gemma-4-e4b, 1024/256", SHARED_KEYS, "1024", "256", 35_000, (Prediction("share_of_serial", 0.60),), 400,
            least=100, trace=True,
        ),
        Item(
            "gemma-3n-e2b, 1024/256", STREAMS, "1024", "256", 45_000, (Prediction("share_of_serial", 0.40),), 400,
            least=100, trace=True,
        ),
        Item(
            "glm-4.7-flash, 1024/256", LATENTS, "1024", "256", 32_000, (Prediction("share_of_serial", 0.38),), 400,
            least=100, trace=True,
        ),
        Item(
            "kimi-linear-48b-a3b, 1024/256", CHANNELS, "1024", "256", 30_000, (Prediction("share_of_serial", 0.30),),
            300, least=100, trace=True,
        ),
        Item(
            "falcon-mamba-7b, 1024/256", STATES_ALONE, "1024", "256", 26_000, (Prediction("share_of_serial", 0.55),),
            300, least=100, trace=True,
        ),
        Item(
            mixture, MIXTURE, "1024", "256", 30_000, (Prediction("share_of_serial", 0.28),), 400,
            least=100, trace=True,
        ),
        Item(
            "gpt-oss-20b, 1024/256, fp8 weights", MIXTURE, "1024", "256", 40_000,
            (Prediction("total_tok_s", 1.35, over=mixture),), 400,
            least=100, trace=True, settings={"quantization": "fp8"},
        ),
    ]  # fmt: skip


def beside_vllm() -> list[Item]:
    """vLLM and bulkrun in turn, each in a process of its own, without prefix caches: vLLM's script warms up on the
    very prompts that it then measures."""
    items = []
    for number in (1, 2):
        ours, theirs = f"bulkrun 1024/512, {number}", f"vllm 1024/512, {number}"
        faster = Prediction("total_tok_s", 1.10, over=theirs)
        item = Item(theirs, LLAMA, "1024", "512", 22_000, (), 1500, roofline=False, engine="vllm")
        own_settings = {"enable_prefix_caching": False}
        items += [item, replace(item, name=ours, predictions=(faster,), engine="bulkrun", settings=own_settings)]
    return items


def smoke(items: Sequence[Item]) -> list[Item]:
    """The same items at sizes that a CPU does in seconds, to see that everything runs."""
    return [
        replace(
            item,
            shape="llama-20m",
            input_len="4-12",
            output_len="3-6",
            num_requests=6,
            least=0,
            shared_prefix=min(item.shared_prefix, 32),
            settings={**item.settings, "max_model_len": 128, "device": "cpu", "max_num_seqs": 4},
        )
        for item in items
    ]


def fitted(items: Sequence[Item], seconds: float, *, pace: float = 1.0, is_loaded: bool = False) -> list[Item]:
    """Those of one engine's items that fit, in their order, with as many of their requests as fit.

    `pace`: how many times as long as guessed runs take here. `is_loaded`: the engine is there already.
    """
    chosen: list[Item] = []
    for item in items:
        seconds_around = _AROUND_S + item.trace * TRACE_S
        if not is_loaded and not chosen:
            seconds_around += _LOAD_S[item.engine]
        share = min(1.0, _SHARE * (seconds - seconds_around) / (pace * item.seconds))
        num_requests = int(item.num_requests * share)
        if num_requests >= (item.least or item.num_requests):
            chosen.append(replace(item, num_requests=num_requests))
            seconds -= seconds_around + pace * chosen[-1].seconds
    return chosen


def longest_load_s(engine: str = "bulkrun") -> float:
    """An engine that is not there after so many seconds hangs."""
    return _LONGEST["load"] * _LOAD_S[engine]


def longest_s(item: Item, pace: float) -> float:
    """A run, or its trace, that has not ended after so many seconds hangs."""
    return _LONGEST["run"] * (_AROUND_S + max(item.trace * TRACE_S, pace * item.seconds))


def same_engine(one: Item, other: Item) -> bool:
    """Whether two items can run in one process on one loaded model."""
    return one.engine == other.engine == "bulkrun" and (one.shape, one.settings) == (other.shape, other.settings)


def _against_serial(
    num_input: int, num_output: int, num_requests: int, *, serial: float, expected: float, trace: bool = False
) -> Item:
    """`trace`: and op by op where the time goes."""
    predictions = [Prediction("share_of_serial", expected, 0.85)]
    if trace:
        predictions.append(Prediction("idle.between_steps", 0.01, 0.02, at_most=True))
    return Item(
        _named(f"{num_input}/{num_output}", num_requests), LLAMA, str(num_input), str(num_output), expected * serial,
        tuple(predictions), num_requests, least=_least(num_requests), trace=trace,
    )  # fmt: skip


def _nanoflow(num_requests: int) -> Item:
    predictions = (Prediction("share_of_nanoflow", 0.72, 0.80),)
    name, least = _named("2048/128", num_requests), _least(num_requests)
    return Item(name, LLAMA, "2048", "128", 0.73 * 49_191, predictions, num_requests, least=least)


def _named(lengths: str, num_requests: int) -> str:
    return lengths if num_requests < ASKED_REQUESTS else f"{lengths}, {ASKED_REQUESTS:,} requests"


def _least(num_requests: int) -> int:
    """Those that the issue asks for are not cut."""
    return num_requests if num_requests >= ASKED_REQUESTS else num_requests * 3 // 5


def _shared(
    name: str, total_tok_s: float, num_requests: int, predictions: tuple[Prediction, ...], **settings: Any
) -> Item:
    return Item(
        name, LLAMA, "100", "100", total_tok_s, predictions, num_requests,
        shared_prefix=1000, settings=settings, roofline=False,
    )  # fmt: skip


def _qwen(name: str, predictions: tuple[Prediction, ...], roofline: bool = False, **settings: Any) -> Item:
    return Item(
        name, QWEN, "100-1024", "100-1024", 25_000, predictions, 256,
        settings=settings, roofline=roofline, trace=roofline,
    )  # fmt: skip


def _small(name: str, predictions: tuple[Prediction, ...], **settings: Any) -> Item:
    return Item(name, LLAMA, "1024", "256", 28_000, predictions, 400, settings=settings, roofline=False)


def _mean(length: str) -> float:
    low, _, high = length.partition("-")
    return (int(low) + int(high or low)) / 2
