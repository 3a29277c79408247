"""Making models: training recipes, and the conversion of dense models into hybrids."""
