"""A sentence encoder behind HTTP that takes new weights while it serves: `python -m examples.serve`."""
