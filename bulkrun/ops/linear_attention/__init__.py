"""Attention that keeps a state of one size per sequence instead of keys and values: references."""
