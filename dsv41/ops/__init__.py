"""Numerics of the architecture: functions of tensors, without modules' parameters or configurations of models."""
