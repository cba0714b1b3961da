"""The parent of a run: it opens the run, starts child processes, and survives their crashes."""
