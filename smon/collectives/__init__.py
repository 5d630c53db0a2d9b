"""Traces that only have collectives: who comes late, what it costs, without a pipeline model."""
