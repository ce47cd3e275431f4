"""A job file against the world: its files, model, schemas and defaults, checked before anything heavy is loaded."""
