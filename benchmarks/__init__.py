"""Demo and measurements: they start the real server or engine on small models made on the spot."""
