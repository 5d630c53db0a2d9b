"""HTTP: routes, schemas, access, pages. Maps errors to status codes; computes nothing."""
