"""Sharded checkpoints: what is stored, where, and how it comes back on other ranks."""
