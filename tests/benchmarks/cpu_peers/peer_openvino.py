"""OpenVINO GenAI as a peer: continuous batching, 64 sequences and 512 tokens a step, KV cache in bf16 like ours.

It finds a prefix in its cache only after the request that had it first is done: `--first-alone` is for its best time.
Its grammar of a JSON schema allows white space without end, which is what random weights write: it gets a regex.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.cpu_peers.peer import Generate, Options, run_peer
from tests.benchmarks.invoice import pattern
from tests.benchmarks.work import Work, longest_output_first

if TYPE_CHECKING:
    from openvino_genai import GenerationConfig

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = 64, 512


def load(options: Options) -> Generate:
    """The exported model on the CPU plugin."""
    import numpy as np
    from openvino import Tensor
    from openvino_genai import ContinuousBatchingPipeline, SchedulerConfig

    scheduler = SchedulerConfig()
    scheduler.max_num_seqs = MAX_NUM_SEQS
    scheduler.max_num_batched_tokens = MAX_NUM_BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    precision = {"bfloat16": "bf16", "float32": "f32"}[options.computed_in]
    properties = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
        "INFERENCE_NUM_THREADS": options.threads,
    }
    pipeline = ContinuousBatchingPipeline(str(options.model), scheduler, "CPU", properties)

    def generate(work: list[Work]) -> list[list[int]]:
        order = longest_output_first(work)
        prompts = [Tensor(np.array([work[i].prompt_token_ids], dtype=np.int64)) for i in order]
        results = pipeline.generate(prompts, [_config(work[i].num_output_tokens, options) for i in order])
        outputs: list[list[int]] = [[] for _ in work]
        for i, result in zip(order, results, strict=True):
            outputs[i] = list(result.m_generation_ids[0])
        return outputs

    return generate


def _config(num_tokens: int, options: Options) -> GenerationConfig:
    from openvino_genai import GenerationConfig, StructuredOutputConfig

    config, sampling = GenerationConfig(), options.sampling
    config.max_new_tokens = num_tokens
    config.ignore_eos = options.schema is None
    if options.schema is not None:
        config.structured_output_config = StructuredOutputConfig(regex=pattern())  # see the module's text
    config.do_sample = sampling.temperature > 0
    if config.do_sample:
        config.temperature, config.top_p = sampling.temperature, sampling.top_p
        if sampling.top_k:
            config.top_k = sampling.top_k
    return config


if __name__ == "__main__":
    run_peer(load, "openvino-genai", "openvino")
