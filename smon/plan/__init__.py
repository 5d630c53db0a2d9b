"""What each fix would buy, simulated on the job's own trace."""
