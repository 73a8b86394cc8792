"""The HTTP API, one file per endpoint."""
