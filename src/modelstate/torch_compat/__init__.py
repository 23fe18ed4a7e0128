"""Everything that is asked of torch under names that are not public, in one room."""
