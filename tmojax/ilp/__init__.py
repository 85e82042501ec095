"""Mixed-integer models of rivals, and the solvers that they are given to."""
