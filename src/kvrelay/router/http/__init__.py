"""HTTP/1.1 on both sides, at protocol level: httptools parses, bodies pass through as they are."""
