"""State that torch's own state dicts have no place for."""
