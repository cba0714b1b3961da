"""Checks that the machine and its clock can be trusted."""
