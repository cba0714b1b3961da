"""HTML page of measurements, predictions and advice.

The page is a single file that needs no server. The page's script can also predict the times of
shapes that were not measured.
"""
