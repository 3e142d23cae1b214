"""WHEN a request is evicted, and what that needs: one file for each way of evicting."""
