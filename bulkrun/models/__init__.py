"""Weights and the forward pass: one decoder for the Llama family. Knows no scheduling, no files but a model's."""
