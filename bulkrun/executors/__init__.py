"""Who starts the workers of a run: this machine, Slurm or Ray. None of them knows tokens or tensors."""
