"""One timed batch and what is known about it; nothing in here knows a kernel."""
