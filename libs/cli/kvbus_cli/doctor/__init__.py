"""`kvbus doctor`: what is there, what is missing, and what does not fit together."""
