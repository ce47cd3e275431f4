"""Mixtures of experts: routing, and the products with the weights of those that were chosen."""
