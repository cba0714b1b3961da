"""Fakes, simulated machines and other helpers that tests, studies and acceptance tests share."""
