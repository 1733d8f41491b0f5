"""Data: converts tensors, loaders and folders of images into batches."""
