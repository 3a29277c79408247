"""Routes for operators: health, metrics, models, documentation."""
