"""Commands of the analysis package, one module per group of subcommands."""
