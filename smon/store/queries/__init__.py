"""What the REST API and the pages ask the database: rows become frozen values, page by page.

Flow: `smon.store.models` → **here** → `smon.api.routes`, `dashboards.web`. Every query takes the
tenant; another tenant's id is a `smon.errors.MissingError`, as one that does not exist.
"""
