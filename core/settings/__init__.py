"""Everything that a user can choose or turn: parameters with bounds and help, the registry, presets, pins."""
