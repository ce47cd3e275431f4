"""From logits to tokens: masks and penalties, the choice of a token, log-probabilities."""
