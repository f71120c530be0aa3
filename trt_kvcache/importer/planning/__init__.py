"""Plan a prepared graph. These modules read the graph, but never change it."""
