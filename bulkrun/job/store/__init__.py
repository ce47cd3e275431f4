"""What is on disk and the verbs that put it there: layout, durable writes, journal, claims, the run's record."""
