"""The version of this library, for whoever may not import all of it."""

__version__ = "0.1.0"
