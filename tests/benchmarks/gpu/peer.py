"""vLLM's benchmark script without its prefix cache: `python -m tests.benchmarks.gpu.peer SCRIPT [ARGUMENT ...]`.

The script warms up on the first 64 of the prompts that it then measures, which a prefix cache would answer; it has no
option for that. Neither side shares a prefix here, so that both go without.
"""

from __future__ import annotations

import runpy
import sys
from functools import partial

if __name__ == "__main__":  # not in the processes that vLLM spawns
    import vllm

    vllm.LLM = partial(vllm.LLM, enable_prefix_caching=False)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
