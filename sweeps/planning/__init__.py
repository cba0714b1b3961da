"""Choose the cases of a run, their order and their shards, and estimate what they take."""
