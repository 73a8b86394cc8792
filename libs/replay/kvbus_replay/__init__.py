"""Traces of agent sessions, and their replay: the real cores of router, index, engine and tiers under a virtual clock."""
