"""Tests of modelstate.convert and what stands on it."""
