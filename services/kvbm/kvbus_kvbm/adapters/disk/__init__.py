"""G3: KV blocks on a disk of this host."""
