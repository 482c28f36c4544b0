"""When actions ran, and what they cost: recorders, and `profile`."""
