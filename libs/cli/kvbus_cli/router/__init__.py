"""`kvbus router explain` and `kvbus router limits`: questions to the routers that run."""
