"""Everything that is measured where there is a GPU, in stages: `python -m tests.benchmarks.gpu`."""
