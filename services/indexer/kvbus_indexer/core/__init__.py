"""Pure state of the indexer: content, the progress of each instance, repairs."""
