"""What the text of an output holds: thoughts, tool calls, values that fit a schema, log-probabilities."""
