"""From a prepared graph to the plan. Reads the graph, changes nothing."""
