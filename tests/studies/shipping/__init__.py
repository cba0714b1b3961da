"""What is shipped for those who measured and imported nothing: constants, and how sure they are."""
