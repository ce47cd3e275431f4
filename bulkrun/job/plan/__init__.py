"""From rows to shards: what to run, in which order, in which unit of commit. Begin with `planner`."""
