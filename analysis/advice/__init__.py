"""Recommend faster shapes, and judge whether a change of shape is worth making."""
