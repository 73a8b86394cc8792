"""Decisions of the worker service: pure, synchronous, under a clock that is passed in."""
