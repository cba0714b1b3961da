"""HTML page of measurements, predictions and advice.

The page is one file. Its script also predicts other shapes, in the browser.
"""
