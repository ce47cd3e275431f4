"""Texts to vectors: encoders, pooling, what comes behind it."""
