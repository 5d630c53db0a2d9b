"""What requests and answers look like: pydantic models, the source of the OpenAPI document.

Flow: frozen values of `smon.store.queries` → **here** → JSON. Pydantic lives here and nowhere else.
"""
