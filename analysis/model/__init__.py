"""The time model: constants, residual, calibration, and the table of measured and predicted."""
