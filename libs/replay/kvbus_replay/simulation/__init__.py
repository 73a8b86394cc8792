"""The cluster in virtual time: the services' cores, wired by events instead of a bus. Synchronous and deterministic."""
