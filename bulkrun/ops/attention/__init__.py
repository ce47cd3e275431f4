"""Attention and what goes into it: rotary positions, the KV write, where a step's keys and values lie."""
