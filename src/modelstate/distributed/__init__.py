"""Tensors over several ranks: the shard that each rank holds, and the agreement of all ranks."""
