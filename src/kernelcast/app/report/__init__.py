"""What people and programs read: text for a terminal, and JSON."""
