"""Choose the cases of a run, their order and their shards, and estimate how long they take."""
