"""Saved prefixes on disk: named sessions and the disk tier of the prefix cache."""
