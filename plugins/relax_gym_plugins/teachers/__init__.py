"""Teacher engines."""
