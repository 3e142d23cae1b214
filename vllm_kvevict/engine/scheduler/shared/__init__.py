"""KV that requests share: what is stored, compressed and not, and who begins with it."""
