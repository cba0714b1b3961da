"""Check whether the machine and its clock can be trusted."""
