"""The worker's edges: engines, model files, kvbm, load reports, metrics."""
