"""What the engine's bookkeeping and the kernels both know of KV blocks, without torch."""

NULL_BLOCK = 0  # never allocated: padding in block tables points here, and padded tokens may write here
