"""The field's rules as experiments, each with a verdict that is computed."""
