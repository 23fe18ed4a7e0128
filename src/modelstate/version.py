"""The version of the library, for rooms that must not import its public names."""

__version__ = "0.1.0"
