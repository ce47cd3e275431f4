"""What is computed when, and when it ends: sequences, blocks, queues and policies. Pure Python, no tensors."""
