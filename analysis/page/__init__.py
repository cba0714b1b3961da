"""HTML page of measurements, predictions and advice.

The page is a single file that needs no server. The page's script also predicts shapes that were not
measured.
"""
