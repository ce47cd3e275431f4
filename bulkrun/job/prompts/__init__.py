"""Rows to prompts: templates, conversations, per-row sampling, fitting to the model's length."""
