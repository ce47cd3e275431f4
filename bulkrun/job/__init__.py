"""What to run and how far it got: the job file, the plan, the durable run. Knows no torch."""
