"""`kvbus events`: the KV event stream in the terminal."""
