"""What the indexer does with each kind of message."""
