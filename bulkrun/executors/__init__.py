"""Who starts the workers of a run: this machine or Slurm. None of them knows tokens or tensors."""
