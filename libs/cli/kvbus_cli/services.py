"""The names of the services."""

SERVICES = {
    "frontend": "HTTP API: templates, tokenizing, streaming, usage",
    "router": "worker choice, queueing, reservations",
    "indexer": "the global view of which instance holds which KV block",
    "worker": "one inference engine (torch or mock)",
    "kvbm": "KV block tiers of one host, shared by its workers",
}
