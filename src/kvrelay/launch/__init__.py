"""`kvrelay up`: one configuration becomes running processes."""
