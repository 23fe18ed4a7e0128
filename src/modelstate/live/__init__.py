"""Programs that serve: their names, their versions, and new weights for them."""
