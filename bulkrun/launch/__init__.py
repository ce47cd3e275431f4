"""Where the two columns meet: a job becomes tokenizer, planner process, engine and runner. Prints nothing."""
