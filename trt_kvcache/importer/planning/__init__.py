"""Plan a prepared graph. These modules read the graph and never change it."""
