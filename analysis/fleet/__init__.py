"""Judge several GPUs of one model by anchors that all of them timed: which is slow, and why."""
