"""`kvbus index query`, `kvbus index top` and `kvbus index digest`: questions to the indexers that run."""
