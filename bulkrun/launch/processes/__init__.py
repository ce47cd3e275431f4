"""The processes of a run: planner and workers, who looks after them, and how signals stop them."""
