"""transformers' static `generate` as a peer: batches of 8 of like output length, the best size seen on this work."""

from __future__ import annotations

from dataclasses import asdict

from tests.benchmarks.cpu_peers.peer import Generate, Options, run_peer

BATCH_SIZE = 8  # larger ones are slower on a CPU: more padding, and attention over it


def load(options: Options) -> Generate:
    """The checkpoint through AutoModelForCausalLM, with its default attention (sdpa)."""
    import transformers

    from tests.benchmarks.static_generate import load_transformers, run_static

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = load_transformers(options.model, options.computed_in)
    sampling = options.sampling
    if sampling.temperature == 0:
        return lambda work: run_static(model, work, BATCH_SIZE)
    return lambda work: run_static(model, work, BATCH_SIZE, do_sample=True, **asdict(sampling))


if __name__ == "__main__":
    run_peer(load, "transformers", "torch")
