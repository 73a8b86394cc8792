"""I/O of the indexer besides its handlers."""
