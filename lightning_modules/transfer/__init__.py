"""Weights between runs and folders: export, import, pretrained weights, the record of a run."""
