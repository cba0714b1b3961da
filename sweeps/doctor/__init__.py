"""Whether the machine and its clock can be trusted."""
