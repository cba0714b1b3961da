"""The parent process of a run. It opens the run, and starts and replaces child processes."""
