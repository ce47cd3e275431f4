"""Text to tokens and back: tokenizer, chat templates, stop strings. Torch-free; wired by launch alone."""
