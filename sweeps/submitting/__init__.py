"""One run on the nodes of a cluster: jobs that each carry out a node's shares, and who follows."""
