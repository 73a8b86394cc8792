"""I/O of the router besides its handlers."""
