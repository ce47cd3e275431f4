"""Triton kernels, one module per op, each with the signature of its torch reference one floor up.

Nothing here is imported where tensors are not on a CUDA device (or a test asks for the interpreter): see
`bulkrun.ops.dispatch`. Block sizes come from shapes and dtypes alone, never from the batch and never from timing, so a
row's result does not depend on the rows beside it. Products in fp8 are the exception, the dense one too, which is
torch's: their tiles go by the number of rows.
"""

import os

# Multiply-adds in one rounding, which is what Triton did up to 3.9; later ones ask for a word, and warn without it.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
