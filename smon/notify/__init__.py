"""Messages about findings for people without Prometheus: by webhook, or to Slack and its like."""
