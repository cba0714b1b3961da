"""Judge several GPUs of one model by cases timed on all of them: which GPU is slow, and why."""
