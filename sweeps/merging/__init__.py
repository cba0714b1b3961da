"""One recording of several that were made without shards: on several nodes, on several days."""
