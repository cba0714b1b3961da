"""Time of a problem on a machine, by one formula of facts and constants."""
