"""Makes the parts of the plan from a prepared graph. These modules read the graph, but never change it."""
