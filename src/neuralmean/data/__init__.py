"""Data: turns whatever the caller has (tensors, loaders, folders of images) into batches."""
