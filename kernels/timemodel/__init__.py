"""What a problem takes on a machine, from facts and constants: the one formula."""
