"""Weights in and out of folders: released names, storage formats, files, transformers' layout, model card."""
