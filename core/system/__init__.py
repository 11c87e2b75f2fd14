"""Machine and file access: memory limits, process memory, bounded reads, other libraries' messages."""
