"""Who is let in, when, and how often. Pure: callers bring the time."""
