"""`kvbus bench`: measurements that need no other program."""
