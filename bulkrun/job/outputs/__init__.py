"""What the text of an output holds: thoughts, calls of tools, values that fit a schema, log-probabilities."""
