"""Numerics of the architecture: functions of tensors, without parameters of modules or configurations."""
