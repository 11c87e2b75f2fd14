"""What the machine and its files allow: memory limits, process memory, bounded reads, other libraries' messages."""
