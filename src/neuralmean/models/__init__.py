"""Models: choosing layers, building and running models, detecting changed weights."""
