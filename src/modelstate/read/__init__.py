"""From files and mappings to a `Checkpoint`: what is there, and ways to its bytes."""
