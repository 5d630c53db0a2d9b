"""Metrics of running jobs, made anew at each scrape from what the store knows."""
