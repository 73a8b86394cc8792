"""The outside: arena files, the memory probe and metrics."""
