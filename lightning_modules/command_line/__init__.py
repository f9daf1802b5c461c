"""Rules of the command line beyond LightningCLI: words put before it, ranges, trainer options, optimizers."""
