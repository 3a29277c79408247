"""Results of all measurements: one record format, one chart style, one report page."""
