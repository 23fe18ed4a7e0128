"""Changing what the tensors of a module are, and keeping who they are."""
