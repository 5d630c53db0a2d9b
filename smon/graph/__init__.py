"""The dependency model of one training step: lanes → structures → graphs → programs."""
