"""Carry out one run on the nodes of a cluster: submit a job for each node, and follow the jobs."""
