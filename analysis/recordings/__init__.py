"""What was measured: our own recordings, others' tables, and how both are read and written."""
