"""Training checkpoints: finding, writing, reading, and the rule for their authority over options."""
