"""All user settings: parameters with bounds and help, the registry, presets, pins."""
