"""Programs that show modelstate at work."""
