"""Other people's times as recordings: public tables, other programs' files, your own CSV."""
