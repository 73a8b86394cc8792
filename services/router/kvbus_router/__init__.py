"""The router service: which worker runs a request, and which request is next."""
