"""Explicit changes between the names and tensors of a checkpoint and those of a model."""

from modelstate.plan.rules.transformers_mapping import from_transformers as from_transformers
