"""``analysis record``: record everything about a machine, in several calls if time is short."""
