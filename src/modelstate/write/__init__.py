"""From state in memory to files: complete and durable, or not there."""
