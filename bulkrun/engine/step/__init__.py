"""One step on the device: rows that live there, the model's input, its forward pass, the choice of tokens."""
