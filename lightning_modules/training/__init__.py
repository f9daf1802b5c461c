"""One training step: loss totals, metrics, gradients, checks of precision and finiteness."""
