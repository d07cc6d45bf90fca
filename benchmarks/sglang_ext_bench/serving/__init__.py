"""Real servers under one kind of load."""
