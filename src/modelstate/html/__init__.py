"""Pages that show a result in a browser and in a notebook."""
