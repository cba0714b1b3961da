"""Check whether times measured on this machine can be trusted."""
