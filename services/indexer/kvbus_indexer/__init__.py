"""The indexer service: which worker and tier holds which block."""
