"""What the router does with each kind of message."""
