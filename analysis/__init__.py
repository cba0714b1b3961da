"""What the measurements mean: model, plots, recommendations. Needs no GPU, torch or Triton."""
