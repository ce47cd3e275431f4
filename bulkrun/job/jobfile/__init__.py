"""The job file: its keys as types, and YAML to a checked spec with all problems at once."""
