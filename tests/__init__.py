"""Tests, and what they share: helpers in `support`, timed programs in `studies`."""
