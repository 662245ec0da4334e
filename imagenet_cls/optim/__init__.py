"""How weights follow gradients: parameter groups, optimizers, learning-rate schedules, losses."""
