"""Pure state and decisions of the router: load, cost, policies, queue."""
