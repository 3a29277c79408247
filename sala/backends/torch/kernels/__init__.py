"""What makes a reference in `ops/` fast. Nothing here is needed for a right answer."""
