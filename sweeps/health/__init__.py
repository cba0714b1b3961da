"""Whether the machine and the clock can be trusted."""
