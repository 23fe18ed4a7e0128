"""Explicit changes between the names and tensors of a checkpoint and those of a model."""
