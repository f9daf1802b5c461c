"""Training checkpoints: finding, writing, reading and the rule for what they decide."""
