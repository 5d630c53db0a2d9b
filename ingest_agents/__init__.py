"""What runs on GPU hosts: the recorder inside the trainer, and the agent that ships its trace."""
