"""What steering costs, in operations, memory and time, before anything is run. It knows sizes, not weights."""
