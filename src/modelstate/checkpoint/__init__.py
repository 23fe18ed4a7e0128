"""The `Checkpoint`: opening, reading, combining and writing what a file or directory holds."""
