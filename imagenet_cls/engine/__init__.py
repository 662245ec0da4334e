"""Parts, loop, evaluation and checkpoints: where everything comes together."""
