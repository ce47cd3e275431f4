"""What is on disk of a run: layout, journal, claims, heartbeats, the record."""
