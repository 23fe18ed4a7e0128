"""The ways to load a checkpoint."""
