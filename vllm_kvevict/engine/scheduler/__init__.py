"""In the engine core: which requests run, what they hold on each rank, and when chunks end. Knows counts, no pages."""
