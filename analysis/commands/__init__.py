"""Commands of the analysis package.

A module has one command, a few related commands, or code that commands share.
"""
