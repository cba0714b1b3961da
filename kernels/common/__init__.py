"""What every package leans on: errors, names of commands, checks of documents and words."""
