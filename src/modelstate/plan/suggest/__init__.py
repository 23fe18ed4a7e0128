"""Rules that are worked out from the names, shapes and dtypes of both sides. They are proposed, and never applied."""
