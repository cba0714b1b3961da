"""Judge several GPUs of one model by cases that all of them timed: which GPU is slow, and why."""
