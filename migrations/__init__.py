"""The history of the SQL schema (Alembic); runs on SQLite and PostgreSQL."""
