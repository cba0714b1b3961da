"""The time model: priors, fits, calibration, and the table of measured and predicted times."""
