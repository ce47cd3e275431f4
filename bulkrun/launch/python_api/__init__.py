"""What `import bulkrun` offers: `LLM`, which answers prompts, and `run_job`, which submits."""
