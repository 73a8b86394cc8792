"""`kvbus kv`: looking into the tiers of KV blocks."""
