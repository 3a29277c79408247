"""Training recipes, and the conversion of dense models into hybrids."""
