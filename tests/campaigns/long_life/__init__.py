"""A run's whole life as a random walk: `python -m tests.campaigns.long_life`."""
