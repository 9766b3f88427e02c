"""`StepTimer`: measures where the time of a step goes."""
