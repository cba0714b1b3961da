"""Several GPUs of one model that timed the same anchors: which is slow beyond doubt, and why."""
