"""One module per revision of the schema, the oldest first."""
