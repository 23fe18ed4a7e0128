"""Checkpoints of a training run: saved so that they survive, and restored all together."""
