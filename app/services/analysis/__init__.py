"""What-if analysis: replays recorded routing through every policy and predictor, in processes of its own."""
