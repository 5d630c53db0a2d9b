"""Where an agent's events come from, one module per source; each takes its root as an argument."""
