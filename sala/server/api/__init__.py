"""The public API routes and their request and response schemas."""
