"""Checkpoints of other programs: read without running anything that they say to run."""
