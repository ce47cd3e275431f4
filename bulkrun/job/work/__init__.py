"""One worker's part in a run: feed, loop, recorder, commit, finish."""
