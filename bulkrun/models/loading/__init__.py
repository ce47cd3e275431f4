"""From tensors on disk, or random ones, to a model on its device: names, fused weights, fp8, what fits."""
