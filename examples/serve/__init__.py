"""Serves a sentence encoder over HTTP, and swaps its weights while it serves: `python -m examples.serve`."""
