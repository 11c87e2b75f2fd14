"""What fits and how fast it will be: sizes, the memory plan, tiers, forecasts, free memory and memory accounting."""
