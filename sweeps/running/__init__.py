"""The parent process of a run. It opens the run, starts child processes, and survives crashes."""
