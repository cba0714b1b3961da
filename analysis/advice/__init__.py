"""Recommend faster shapes: other sizes of a problem, and the verdict on a change."""
