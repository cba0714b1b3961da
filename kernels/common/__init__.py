"""Helpers that every package uses: errors, names of commands, checks of documents and words."""
