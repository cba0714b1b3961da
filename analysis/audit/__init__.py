"""From a whole model to the dimension to change: the account of a step, and its levers."""
