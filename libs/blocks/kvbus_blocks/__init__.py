"""Block identity and prefix index: pure, synchronous, no I/O."""
