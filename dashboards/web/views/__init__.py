"""What each page shows, ready for its template: one module for each page."""
