"""Sharding of a model over ranks, outside the model."""
