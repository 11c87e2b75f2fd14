"""What would have been: recorded routing through every policy and predictor, in processes beside the engine's."""
