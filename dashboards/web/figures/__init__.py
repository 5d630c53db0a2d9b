"""Figures of the pages, as plain data for plotly.js; one module for each kind."""
