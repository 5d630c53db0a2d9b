"""The routes of the REST API, one module per thing that they are about.

Flow: request → `smon.api.access` → **here** → `smon.store.queries` → JSON.
"""
