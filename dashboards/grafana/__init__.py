"""Dashboards for Grafana, made by code and kept as JSON beside it (``docs/grafana.md``)."""
