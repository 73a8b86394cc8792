"""`kvbus up`: the whole system on one machine. Nothing restarts itself."""
