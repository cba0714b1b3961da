"""Find out which of several GPUs of one model are slow, and why."""
