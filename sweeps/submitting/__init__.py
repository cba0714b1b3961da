"""One run on the nodes of a cluster: a job for each node, and a process that follows the jobs."""
