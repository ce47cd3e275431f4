"""Texts to scores of labels: a model, and its head. Inference only."""
