"""A small network that has seen solved steps and guesses what a planner would do with every idle tensor."""
