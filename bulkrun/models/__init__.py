"""Weights and forward passes: decoders, encoders and heads for labels. Knows no scheduling, no files but a model's."""
