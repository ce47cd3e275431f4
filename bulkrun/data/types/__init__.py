"""Types of columns and of values: what a cast loses, what is inside a list, what JSON holds. Knows no files."""
