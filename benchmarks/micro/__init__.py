"""What developers time, each ``python -m benchmarks.micro NAME``; most of it starts no server."""
