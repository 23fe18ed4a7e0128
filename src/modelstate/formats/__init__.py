"""The file formats: readers beside writers."""
