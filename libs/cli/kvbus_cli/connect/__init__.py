"""`kvbus connect`: configurations of agents for a running server."""
