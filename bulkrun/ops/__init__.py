"""Functions of tensors: each op's contract and pure-torch reference; Triton kernels sit beside them. Knows no model."""
