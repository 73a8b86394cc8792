"""What the worker does with each message and each engine step."""
