"""What is told of a request: its durations, a line of a log, its spans. Pure: times and ids are arguments."""
