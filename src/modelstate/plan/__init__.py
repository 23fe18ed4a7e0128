"""From a checkpoint and a module to a plan: what goes where, and everything that stands in the way."""
