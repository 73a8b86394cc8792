"""`kvbus worker roles` and `kvbus worker set-role`: questions to the workers that run."""
