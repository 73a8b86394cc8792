"""Block identity, prefix index, eviction order: pure, synchronous, no I/O."""
