"""Planning: what a run will need. Pure functions; no process group, no GPU."""
