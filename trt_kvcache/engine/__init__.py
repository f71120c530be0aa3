"""From a plan to an engine and its manifest: builds in child processes, manifests, inspection, diagnosis."""
