"""Import existing times: public tables, files of other programs, and the user's own CSV files."""
