"""What a model's directory says: sizes, families and their flags, layer kinds, RoPE scaling; refused by name here."""
