"""What is done with runs: submit, nights, retries, Slurm's queue, cancel, and previews that make none."""
