"""What eviction costs in quality: tasks and suites, asked of any server, and a report; needs the extra ``quality``."""
