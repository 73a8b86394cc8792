"""Traces: what was asked when, as lengths and block hashes; never text."""
