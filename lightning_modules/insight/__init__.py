"""Measurements inside a model, by concept: each file has the measure, its picture and its callback."""
