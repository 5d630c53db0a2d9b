"""How much time is lost, and by which op type, stage, DP rank and worker."""
