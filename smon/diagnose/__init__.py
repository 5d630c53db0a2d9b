"""From numbers to answers: evidence → causes → ranking and verdict."""
