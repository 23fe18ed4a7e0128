"""From a checkpoint and a module to a plan: what goes where, and every problem that stands in the way."""
